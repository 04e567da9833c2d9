"""Types for Python models: :class:`Model`, :class:`StreamingModel`, :class:`SteppingModel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "PENDING",
    "Context",
    "InvalidInput",
    "Model",
    "SteppingModel",
    "StreamingModel",
    "Tensor",
]

PENDING = object()
"""The response of a stream that needs another step for its next response."""


@dataclass(frozen=True)
class Tensor:
    """The datatype and the whole shape of an input or output.

    The datatypes are those of the Open Inference Protocol: BOOL, UINT8 to UINT64, INT8 to INT64,
    FP16, BF16, FP32, FP64 and BYTES. BF16 is ``ml_dtypes.bfloat16``. An axis of -1 has any size. If
    the first axis of all tensors is -1, it is the batch axis: the worker joins the rows of several
    requests.
    """

    datatype: str
    shape: Sequence[int]


@dataclass(frozen=True)
class Context:
    """The environment of a model. The worker passes it to the model's method ``load``."""

    name: str
    """The model's name in the configuration."""
    folder: Path
    """The folder that contains the model's file."""
    cache: Path | None
    """The only folder that the model can write to, or ``None``.

    ``TMPDIR``, ``HOME`` and ``XDG_CACHE_HOME`` name the same folder.
    """
    device: str
    """``cuda`` if the model has a GPU, otherwise ``cpu``."""


class InvalidInput(ValueError):
    """An invalid request. If :meth:`Model.infer` raises this, the client gets status 400."""


class Model(Protocol):
    """The interface of a model's class. The class need not inherit from this one.

    ::

        class Doubled:
            inputs = {"x": Tensor("FP32", [-1, 16])}
            outputs = {"y": Tensor("FP32", [-1, 16])}

            def infer(self, batch):
                return {"y": batch["x"] * 2}

    Instead of these two attributes, you can annotate the parameter and the result of ``infer`` with
    a ``TypedDict`` each. The fields have types such as
    ``Annotated[np.ndarray, Tensor("FP32", [-1, 16])]``.

    Each worker creates one object of the class, without arguments. Optional methods are:

    * ``load(context)``, called once before all other methods, and ``unload()``, called at the end.
    * ``warmup()``, which returns an array for each input, with one row if there is a batch axis.
      The worker runs these arrays as its warm-up, instead of generated values.
    * ``reference(batch)``, which returns the correct outputs for a batch. Before a worker
      serves requests, its proof compares these outputs with the outputs of ``infer``.

    With ``deterministic = False``, outputs for the same input may differ, and the proof does not
    compare them. With ``cuda_graph = True``, a batch consists of PyTorch tensors on the model's
    device. On a GPU, the worker records the work of ``infer`` as a CUDA graph, and replays the
    graph.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def infer(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, object]:
        """Returns the outputs for a batch. The batch contains a read-only array for each input.

        The arrays are valid until this method returns. BYTES inputs are arrays of ``bytes``
        objects. Outputs may be tensors of other libraries that support DLPack. The worker copies
        tensors on a GPU to the host. An exception fails the batch. If the failed batch has several
        requests, the worker runs each request alone.
        """
        ...


class StreamingModel(Protocol):
    """The interface of a class that yields several responses to a request.

    The class need not inherit from this one. A worker runs at most ``streams`` requests at a time
    (default 16). The optional methods are those of :class:`Model`.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def generate(self, request: Mapping[str, np.ndarray]) -> Iterator[Mapping[str, np.ndarray]]:
        """Yields the responses to a request.

        The generator may keep the request's arrays. It is resumed when the client can take the next
        response. If the client disconnects, the ``yield`` raises ``GeneratorExit``.
        """
        ...


class SteppingModel(Protocol):
    """The interface of a class whose streams advance together.

    The class need not inherit from this one. A worker has at most ``streams`` open streams
    (default 16). The optional methods are those of :class:`Model`, and ``end(state)``, which is
    called when a stream has ended.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def start(self, request: Mapping[str, np.ndarray]) -> Any:
        """Returns the state of a new stream. The state may keep the request's arrays."""
        ...

    def step(self, states: Sequence[Any]) -> Sequence[Any]:
        """Returns the next response of each stream, in the order of `states`.

        A response is a dict of arrays, ``None`` if the stream has ended, ``PENDING`` if it needs
        another step for its next response, or an exception if it fails. If a state has a true
        attribute ``done``, its response is the last one. If this method raises, the worker calls
        it again with each state alone.
        """
        ...
