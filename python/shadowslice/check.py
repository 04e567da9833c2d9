"""Checks a model's class: ``PYTHON -m shadowslice.check PATH [FOLDER]``.

The command imports the file in a worker's sandbox. Temporary files and caches go to FOLDER. If the
model cannot be loaded, prints the reason. Does not create an object of the class.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import _environment, _worker, worker


def fault(path: Path) -> str | None:
    """Returns the reason why the model cannot be loaded, or ``None``."""
    try:
        from . import _errors, _model_class, _options
    except ImportError as error:
        return worker.missing(error)
    file = path
    try:
        file = _model_class.find_source(path)
        found = _model_class.model_class(_model_class.load_module(file), file)
        tensors = [_model_class.tensors(found, which, file) for which in ("inputs", "outputs")]
        _options.check(found, file, {**tensors[0], **tensors[1]})
        _model_class.streams(found, file)
    except _errors.ModelError as fault:
        return str(fault)
    except BaseException as error:
        return f"{file}:{_errors.line_in(file, error)}: {_errors.describe(error)}"
    return None


if __name__ == "__main__":
    folder = sys.argv[2:]
    _worker.enter_sandbox(folder)
    _environment.redirect_to(Path(folder[0]) if folder else None, on_gpu=False)
    why = fault(Path(sys.argv[1]))
    print(why or "", end="")
    sys.exit(why is not None)
