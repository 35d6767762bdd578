"""From which values of a pass each value was computed, as numbers: neither tensors nor graphs are kept."""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# operators that multiply all their tensors, and those that add the first to a product of the rest
_PRODUCTS = frozenset({"mul", "mul_", "mm", "bmm", "mv"})
_SCALARS = frozenset({int, float, bool, str, type(None)})  # asking these whether they are mappings is slow
_SUMS_OF_PRODUCTS = frozenset({"addmm", "baddbmm", "addmv"})


class Dataflow(TorchDispatchMode):
    """Numbers what tensors hold during a pass, and records from which numbers each was computed.

    It sees every operator, also those inside C++ functions, autograd functions and scripted code. A value's
    number is larger than those of all values that it was computed from.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []  # of each value
        self.parents: list[tuple[int, ...]] = []  # values that it was computed from, as autograd would say
        self.live: list[tuple[int, ...]] = []  # those of them whose gradient no constant zero stops
        self._derived: list[bool] = []  # whether it comes from what the model was given, unlike a weight
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # id -> tensor, version, value
        self._contents: dict[int, tuple[int, ...]] = {}  # storage -> values that were written into it
        self._zeros: dict[int, bool] = {}  # whether all numbers of a constant are zero

    def value(self, tensor: Tensor, *, given: bool = False) -> int:
        """Return a number for the tensor's present content: a new one after each in-place change. What is
        `given` to the model counts as computed."""
        reference, version, value = self._known.get(id(tensor), (None, 0, 0))
        same = reference is not None and reference() is tensor
        if same and version == _version(tensor):
            return value
        written = self._contents.get(_storage(tensor), ()) if _is_differentiable(tensor) else ()
        parents = (value, *written) if same else ()
        return self._add(tensor, parents, parents, derived=given)

    def link(self, value: int, inputs: Iterable[int]) -> None:
        """Let a module's output that no operator has explained depend on the module's inputs."""
        if not self._derived[value]:
            earlier = tuple(v for v in inputs if v < value and self._derived[v])
            self.parents[value] += earlier
            self.live[value] += earlier
            self._derived[value] = bool(earlier)

    def ancestors(self, values: Iterable[int], *, live: bool = False) -> dict[int, set[int]]:
        """For each of the values, those of them that it was computed from."""
        marked = sorted(set(values))
        bits = {value: 1 << index for index, value in enumerate(marked)}
        masks = list[int]()  # of each value, the bits of its ancestors
        for parents in self.live if live else self.parents:
            mask = 0
            for parent in parents:
                mask |= masks[parent] | bits.get(parent, 0)
            masks.append(mask)
        return {value: {other for other in marked if masks[value] & bits[other]} for value in marked}

    def reaching(self, values: Collection[int], *, live: bool = False) -> set[int]:
        """These values and all that they were computed from."""
        reached = set(values)
        edges = self.live if live else self.parents
        for value in range(max(reached, default=-1), -1, -1):
            if value in reached:
                reached.update(edges[value])
        return reached

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        name = schema.name.split("::")[-1]
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        tensors = {key: [t for t in tensors_in(v) if _is_differentiable(t)] for key, v in given.items()}
        sources = {key: [self.value(t) for t in ts] for key, ts in tensors.items() if ts}
        out = func(*args, **kwargs)
        if name.endswith("_like") or name.startswith("new_"):  # which read the shape alone
            sources = {}
        parents = tuple(dict.fromkeys(v for values in sources.values() for v in values))
        live = tuple(v for v in parents if v not in self._stopped(name, sources, tensors))
        entered = [t for ts in tensors.values() for t in ts]
        storages = {_storage(t) for t in entered}
        for made in tensors_in(out):
            if _is_differentiable(made) and not any(made is t for t in entered):
                value = self._add(made, parents, live)
                if _storage(made) not in storages:
                    self._write(made, (value,))
        if schema.is_mutable:
            changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            for tensor in (t for key in changed for t in tensors.get(key, ())):
                before = self._contents.get(_storage(tensor), ())
                self._write(tensor, tuple(dict.fromkeys(before + parents)))
        return out

    def _write(self, tensor: Tensor, values: tuple[int, ...]) -> None:
        if _storage(tensor):
            self._contents[_storage(tensor)] = values

    def _add(
        self, tensor: Tensor, parents: tuple[int, ...], live: tuple[int, ...], *, derived: bool = False
    ) -> int:
        value = len(self.shapes)
        self._known[id(tensor)] = (weakref.ref(tensor), _version(tensor), value)
        self.shapes.append(tensor.shape)
        self.parents.append(parents)
        self.live.append(live)
        self._derived.append(derived or any(self._derived[parent] for parent in parents))
        return value

    def _stopped(
        self, name: str, sources: dict[str, list[int]], tensors: dict[str, list[Tensor]]
    ) -> set[int]:
        """The factors of a product with a constant that is all zero: no gradient reaches them."""
        scales = set(sources) if name in _PRODUCTS else {"weight"} & set(sources)
        addends = {"bias"}
        if name in _SUMS_OF_PRODUCTS:
            scales, addends = set(sources) - {"self"}, {"self"}
        if not any(
            self._is_zero(v, t) for key in scales for v, t in zip(sources[key], tensors[key], strict=True)
        ):
            return set()
        return {v for key, values in sources.items() if key not in addends for v in values}

    def _is_zero(self, value: int, tensor: Tensor) -> bool:
        if not self._derived[value] and value not in self._zeros:
            first = tensor[(0,) * tensor.ndim] if tensor.numel() else tensor
            self._zeros[value] = not bool(first.any()) and not bool(tensor.any())
        return self._zeros.get(value, False)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_in(value)
    elif isinstance(tree, dict) or (type(tree) not in _SCALARS and isinstance(tree, Mapping)):
        for value in tree.values():
            yield from tensors_in(value)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int:
    """The address of the memory that the tensor shares with its views; 0 if it has none of that kind."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse or an opaque tensor
        return 0
