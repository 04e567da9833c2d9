"""Models in Python for shadowslice: see :class:`Model` and :class:`StreamingModel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Context", "InvalidInput", "Model", "StreamingModel", "Tensor"]


@dataclass(frozen=True)
class Tensor:
    """An input or output: its datatype, and its whole shape.

    Datatypes are the protocol's: BOOL, UINT8 to UINT64, INT8 to INT64, FP16, BF16, FP32, FP64 and
    BYTES; BF16 is ``ml_dtypes.bfloat16``. An axis of -1 has any size. Where the first axis of all
    tensors is -1, it is the batch: the rows of several requests come together.
    """

    datatype: str
    shape: Sequence[int]


@dataclass(frozen=True)
class Context:
    """What a model may know of where it runs."""

    name: str
    """The model's name in the configuration."""
    folder: Path
    """Where the model's file lies."""
    cache: Path | None
    """The only folder that can be written, if there is one; also ``TMPDIR``, ``HOME`` and
    ``XDG_CACHE_HOME``."""
    device: str
    """``cuda`` if a GPU is there for the model, else ``cpu``."""


class InvalidInput(ValueError):
    """Raised by :meth:`Model.infer` if the request is at fault: its client gets 400."""


class Model(Protocol):
    """What a model's class has. It need not inherit from this one.

    ::

        class Doubled:
            inputs = {"x": Tensor("FP32", [-1, 16])}
            outputs = {"y": Tensor("FP32", [-1, 16])}

            def infer(self, batch):
                return {"y": batch["x"] * 2}

    Instead of the two attributes, ``infer`` may be annotated with two ``TypedDict`` of fields such
    as ``Annotated[np.ndarray, Tensor("FP32", [-1, 16])]``.

    Each worker makes one object, without arguments. Optional methods are:

    * ``load(context)``, called once before all else, and ``unload()``, called at the end;
    * ``warmup()``, which returns an array for each input, of one row where there is a batch axis:
      they are run before requests come, in place of values that are made up;
    * ``reference(batch)``, which answers as ``infer`` should: the proof compares the two.

    With ``deterministic = False`` answers to the same input may differ, and are not compared. With
    ``cuda_graph = True`` a batch is tensors of PyTorch on the model's device, and on a GPU what
    ``infer`` does is recorded and repeated.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def infer(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, object]:
        """Answers a batch: for each input an array, which is read-only and valid until the return.

        BYTES are arrays of objects, each a ``bytes``. Outputs may be tensors of other libraries, if
        these speak DLPack; from a GPU they are copied to the host. An exception fails the batch; of
        several requests, each is then tried alone.
        """
        ...


class StreamingModel(Protocol):
    """A model's class that gives many answers to a request. It need not inherit from this one.

    A worker generates at most ``streams`` at a time, 16 if the class does not say; optional methods
    are those of :class:`Model`.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def generate(self, request: Mapping[str, np.ndarray]) -> Iterator[Mapping[str, np.ndarray]]:
        """Yields the answers to a request, whose arrays are the generator's to keep.

        The next answer is asked for when the client can take it. A client that leaves raises
        ``GeneratorExit`` at the ``yield``.
        """
        ...
