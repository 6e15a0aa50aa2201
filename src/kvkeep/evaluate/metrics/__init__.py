"""How answers are scored. METRICS[name](prediction, reference or references, **other fields of the row) -> float.

"math" and "aime" are ours; the others are what the named project computes, in its unit.
"""

from kvkeep.evaluate.metrics import infinitebench, longbench, math, short_answers
from kvkeep.registry import Registry

METRICS = Registry(
    "metric",
    {
        "math": math.math_answer,
        "aime": math.aime_answer,
        "math500_kvpress": math.math500_kvpress,
        "aime25_kvpress": math.aime25_kvpress,
        "math_rkv_grader": math.math_rkv_grader,
        "longbench": longbench.score_answer,
        "infinitebench": infinitebench.score_answer,
        "longbench_qa_f1": longbench.qa_f1,
        "longbench_qa_f1_zh": longbench.qa_f1_zh,
        "longbench_rouge_l": longbench.rouge,
        "longbench_rouge_l_zh": longbench.rouge_zh,
        "longbench_classification": longbench.classification,
        "longbench_count": longbench.count,
        "longbench_retrieval": longbench.retrieval,
        "longbench_retrieval_zh": longbench.retrieval_zh,
        "longbench_code_sim": longbench.code_sim,
        "longbench_code_sim_levenshtein": longbench.code_sim_levenshtein,
        "longbench_scorer": longbench.scorer,
        "ruler_string_match_all": short_answers.string_match_all,
        "ruler_string_match_part": short_answers.string_match_part,
        **{f"infinitebench_{name}": metric for name, metric in sorted(infinitebench.TASKS.items())},
        "niah_kvcachefactory_heatmap": short_answers.heatmap,
        "niah_kvcachefactory_rouge1": short_answers.rouge1_of_ten,
        "niah_kvpress_rouge": short_answers.kvpress_rouge,
        "lm_eval_multiple_choice": short_answers.accuracy,
        "lm_eval_acc_norm": short_answers.accuracy_per_character,
        "lm_eval_acc_bytes": short_answers.accuracy_per_byte,
    },
)
