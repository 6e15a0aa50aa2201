"""Runs notebooks and writes what they say into them: python docs/execute.py FILE …; all of examples/: make notebooks"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}  # bars are not to be read
PYTHON = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
HOW = {"timeout": 600, "record_timing": False, "coalesce_streams": True, "shutdown_kernel": "immediate"}


@contextmanager
def kernel(folder: Path) -> Iterator[Callable[[Path], nbformat.NotebookNode]]:
    """A Python in this folder. It executes one notebook after the other, none of which finds names of another."""
    with TemporaryDirectory() as own:
        manager = AsyncKernelManager(transport="ipc", connection_file=f"{own}/kernel.json")
        where = {"metadata": {"path": str(folder)}}
        client = NotebookClient(new_notebook(), manager, resources=where, **HOW)

        def execute(path: Path) -> nbformat.NotebookNode:
            notebook = nbformat.read(path, as_version=4)
            for client.nb in (notebook, new_notebook(cells=[new_code_cell("%reset -f")])):
                client.execute(env=os.environ | QUIET | {"IPYTHONDIR": own, "PYTHONPATH": os.pathsep.join(sys.path)})
            notebook.metadata = PYTHON  # without versions of this machine
            return notebook

        try:
            yield execute
        finally:
            client.nb = new_notebook()
            client.execute(cleanup_kc=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with kernel(Path(name).parent) as execute:
            nbformat.write(execute(Path(name)), name)
