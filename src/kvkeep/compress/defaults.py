"""The methods and budgets used where none is given. Nothing is imported here, so commands name them at no cost."""

PROMPT_METHODS = "kvkeep_lookahead", "kvkeep"  # for prompts: the first one that the model allows
CONTEXT_METHODS = "kvkeep_context", "echo:near=8+shared", "compactor+adakv", "keydiff"  # for texts without a question
BUDGET = 2048  # of engines, chats and servers
DOCUMENT_BUDGET = 512  # of commands that show what is lost: the example's 1,604 tokens would fit into 2,048
