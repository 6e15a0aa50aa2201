"""`python -m kvkeep.cli.follower`: a process of `kvkeep serve --tensor-parallel` that does what the first one does."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
import warnings

from kvkeep.errors import KvkeepError
from kvkeep.serve.followers import GRACE_S, incoming


def main() -> None:
    """Signals are the server's to handle: it ends this process when answers have ended.

    Also before it has sent anything: what takes seconds to import is imported when that is watched.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # the first process says the same
    receive = incoming(sys.stdin.buffer)
    import kvkeep.cli.run  # noqa: F401  the first process imports it at the same time
    from kvkeep.cli.serve import load_split_engine
    from kvkeep.serve.grammar import Grammars

    options, plan, place = pickle.loads(receive())
    try:
        engine = load_split_engine(options, plan, place, lambda text: None)
        engine.follow(receive, grammars=Grammars.of(engine.model, engine.tokenizer))
    except KvkeepError as error:  # which the first process has, too, unless it is this machine's
        time.sleep(GRACE_S)
        print(f"error: process {place.rank}: {error}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
