"""The arguments and options that several commands share, with their help."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.compress.defaults import PROMPT_METHODS

TOKENS = "how many tokens of the prompt each KV head keeps (512), or which fraction of them (0.1)"

Document = Annotated[str, typer.Argument(help="The text file to read; - reads standard input.")]
Question = Annotated[str, typer.Argument(help="The question to answer about the document.")]
Model = Annotated[
    str,
    typer.Option(help="The model to load: `default`, a name on the hub, or a folder. `kvkeep models` suggests some."),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="The method that decides what to keep, with any modifiers: snapkv+adakv. `kvkeep methods` lists them.",
        show_default=PROMPT_METHODS[0],
    ),
]
Budget = Annotated[str, typer.Option(help=f"Set {TOKENS}.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set a parameter of the method, as name=value; repeat it for more.")
]
Storage = Annotated[str | None, typer.Option(help="Quantize the keys and values that are kept: int8 or int4.")]
Device = Annotated[
    str | None,
    typer.Option(help="The device to run on: cpu, cuda, cuda:1 …", show_default="a GPU where there is one"),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="The type to compute in: float32, bfloat16, float16, or auto, as the model was saved.",
        show_default="float32 on a CPU, else auto",
    ),
]
Temperature = Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 takes the likeliest token.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed the sampling, and methods with random parts.")]
ChunkSize = Annotated[int | None, typer.Option(min=2, help="Prefill the prompt in chunks of this many tokens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]

Tasks = Annotated[
    str | None, typer.Option(help="The tasks to score, by commas: ruler, niah, needle, short, longbench/qasper, …")
]
Data = Annotated[
    str | None, typer.Option(help="The folder that holds the benchmarks' official files: longbench/qasper.jsonl …")
]
Haystack = Annotated[str | None, typer.Option(help="The folder of .txt essays that needle tasks hide needles in.")]
Squad = Annotated[str | None, typer.Option(help="SQuAD's dev file, which RULER's qa_1 is made of.")]
HotpotQA = Annotated[str | None, typer.Option(help="HotpotQA's dev file, which RULER's qa_2 is made of.")]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Take this many samples of each task and length.",
        show_default="all; 100 of RULER (officially 500), 10 of needles",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(metavar="[ADDRESS]", help="Run on the Ray cluster at this address; without one, on this machine."),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="Evict once, after the prompt (prompt), or while decoding, too, as each method does (own).",
        show_default="prompt",
    ),
]
Yarn = Annotated[
    float | None, typer.Option(min=1, help="Lengthen the model's context length by this factor, with YaRN.")
]
