"""Says why a model cannot be loaded, as far as its class tells:
``PYTHON -m shadowslice.check PATH [FOLDER]``.

The file is imported in a worker's sandbox, with the folder for temporary files and caches; no
object is made.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import _folders, _worker, worker


def fault(path: Path) -> str | None:
    """What is wrong with the model."""
    try:
        from . import _faults, _found, _options
    except ImportError as error:
        return worker.missing(error)
    file = path
    try:
        file = _found.source(path)
        found = _found.model_class(_found.imported(file), file)
        tensors = [_found.tensors(found, which, file) for which in ("inputs", "outputs")]
        _options.check(found, file, {**tensors[0], **tensors[1]})
        _found.streams(found, file)
    except _faults.Faulty as fault:
        return str(fault)
    except BaseException as error:
        return f"{file}:{_faults.line_in(file, error)}: {_faults.told(error)}"
    return None


if __name__ == "__main__":
    folder = sys.argv[2:]
    _worker.enter_sandbox(folder)
    _folders.lead_to(Path(folder[0]) if folder else None, on_gpu=False)
    why = fault(Path(sys.argv[1]))
    print(why or "", end="")
    sys.exit(why is not None)
