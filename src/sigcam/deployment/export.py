"""export: a network with its branch as one file, from pictures to probabilities, evidence, maps and boxes."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.export import Dim, ExportedProgram

from sigcam.core.errors import AttachError, CheckpointError, ConfigError, MissingExtra, SigcamError
from sigcam.core.files import check_writable, error_line, write_atomic
from sigcam.core.manifest import versions
from sigcam.core.memory import is_out_of_memory
from sigcam.data.sample import Samples
from sigcam.deployment.graph import OUTPUTS, AbsoluteScale, Drawn, ExportedNetwork, Scored
from sigcam.deployment.pillow_resize import PillowResize
from sigcam.deployment.precision import FilePrecision, calibration_inputs, check_onnxruntime, quantized
from sigcam.deployment.triton import write_model_repository
from sigcam.methods.inputs import choose_classes
from sigcam.metrics.boxes import check_threshold
from sigcam.models.preprocess import Preprocess
from sigcam.models.state_dict import fingerprint
from sigcam.network.dual import DualBranch

Format = Literal["onnx", "torch", "triton"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "triton": ""}
OLDEST_OPSET, OPSET = 18, 18
LARGEST_FILE = 2**31 - 1  # bytes: protobuf takes no more
DEFAULT_K = 5


def export(
    net: DualBranch,
    path: str | Path,
    *,
    k: int | None = None,
    classes: Sequence[int | str] | None = None,
    threshold: float | None = None,
    scale: AbsoluteScale | None = None,
    preprocess: bool = True,
    format: Format = "onnx",
    opset: int = OPSET,
    precision: FilePrecision = "float32",
    calibrate: Samples | None = None,
) -> Path:
    """Write the network and its branch to one file that needs neither sigcam nor hooks; return its path.

    Args:
        path: A file.onnx, a file.pt2 for `format="torch"`, a new folder for `format="triton"`.
        k: Number of classes per image whose maps are drawn, the most probable ones; by default 5.
        classes: Draw these classes instead, by number or name.
        threshold: Of boxes; by default 0.5 for maps in probabilities, 0.2 of the maximum for others.
        scale: "probability" (default where the branch is calibrated), or "logit".
        preprocess: Take uint8 pictures (B, H, W, 3) of any size; otherwise the network's input (B, 3, H, W).
        format: "onnx"; "torch", a program of torch.export; "triton", a model of a Triton repository.
        opset: Version of ONNX's operators.
        precision: Of the network in an ONNX file: "float32"; "float16"; or "int8", whose layers compute in
            8-bit integers.
        calibrate: Images that show "int8" which range values have; 100 are taken, evenly from all.
    """
    _check_precision(precision, calibrate, format)
    path, drawn, resize = _checked(net, path, k, classes, threshold, scale, preprocess, format, opset)
    if precision == "float16" and not Scored.linear_in(net):
        raise ConfigError(
            "float16 is for heads of a global average and a linear layer, whose maps need no gradients: "
            "export this network as float32."
        )
    program = exported_program(net, drawn, resize, halved=precision == "float16")
    about = description(net, drawn, resize, precision)
    if format == "torch":
        content = io.BytesIO()
        with _quiet():
            torch.export.save(program, content, extra_files={"sigcam.json": json.dumps(about)})
        data = content.getvalue()
    else:
        data = onnx_bytes(program, about, opset)
        if calibrate is not None:
            data = quantized(data, calibration_inputs(net, calibrate, preprocess))
    if format == "triton":
        write_model_repository(path, data, net.class_names)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
    return path


def _check_precision(precision: FilePrecision, calibrate: Samples | None, format: Format) -> None:
    """Raise ConfigError for a precision that the format does not hold, MissingExtra without onnxruntime."""
    if precision not in get_args(FilePrecision):
        raise ConfigError(
            f"precision is {' or '.join(map(repr, get_args(FilePrecision)))}, not {precision!r}."
        )
    if precision != "float32" and format == "torch":
        raise ConfigError(f"format torch holds float32, not {precision}: use format onnx or triton.")
    if precision == "int8" and calibrate is None:
        raise ConfigError("int8 needs images that show which range values have: give some to calibrate on.")
    if precision != "int8" and calibrate is not None:
        raise ConfigError(f"images to calibrate on are for int8, not {precision}: leave them out.")
    if calibrate is not None:
        check_onnxruntime("exporting in int8")


def _checked(
    net: DualBranch,
    path: str | Path,
    k: int | None,
    classes: Sequence[int | str] | None,
    threshold: float | None,
    scale: AbsoluteScale | None,
    preprocess: bool,
    format: Format,
    opset: int,
) -> tuple[Path, Drawn, PillowResize | None]:
    """Return the file, what it draws and its preprocessing; an error says what cannot be exported."""
    if not isinstance(net, DualBranch):
        raise ConfigError(
            f"export takes what attach returns, not {type(net).__name__}: net = sigcam.attach(model)."
        )
    path = Path(path)
    if format not in get_args(Format):
        raise ConfigError(f"format is {' or '.join(map(repr, get_args(Format)))}, not {format!r}.")
    if path.suffix != SUFFIXES[format]:
        ending = f"a file that ends in {SUFFIXES[format]}" if SUFFIXES[format] else "a folder, without ending"
        raise ConfigError(f"format {format} writes {ending}, not {path}.")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder that exists: name another.")
    _check_opset(opset)
    if not net.fitted:
        raise CheckpointError(
            "the sigmoid branch is not fitted, so its maps are noise: fit it or load one first."
        )
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ConfigError(f"k is a number of classes, at least 1, not {k!r}.")
    if k is not None and classes is not None:
        raise ConfigError("give k= or classes=: the most probable classes, or fixed ones.")
    if scale not in (None, *get_args(AbsoluteScale)):
        raise ConfigError(f"scale is 'probability' or 'logit', not {scale!r}.")
    if scale is None:
        scale = "probability" if 1.0 in net.calibration.maps else "logit"
    if scale == "probability":
        net.calibration.map_scale(1.0)  # raises where there is none
    if threshold is None:
        threshold = 0.5 if scale == "probability" else 0.2
    check_threshold(threshold)
    chosen = None if classes is None else _class_numbers(net, classes)
    count = len(chosen) if chosen else min(k or DEFAULT_K, max(net.classes, 2))
    resize = _resize_of(net) if preprocess else None
    check_writable(path.parent, "Name a file in another folder.")
    return path, Drawn(count, chosen, scale, float(threshold)), resize


def _class_numbers(net: DualBranch, classes: Sequence[int | str]) -> tuple[int, ...]:
    if isinstance(classes, str | int) or not len(classes):
        raise ConfigError("classes is a list of at least one class, such as classes=[281, 'tabby'].")
    wanted: Any = [list(classes)]
    chosen, _ = choose_classes(net, net.run(net.example), wanted)
    return tuple(chosen[0].tolist())


def _resize_of(net: DualBranch) -> PillowResize:
    if not isinstance(net.transform, Preprocess):
        raise ConfigError(
            "the preprocessing of this network is not known as a resize and a normalisation, so a file "
            "cannot hold it: export without (preprocess=False)."
        )
    return PillowResize(net.transform)


def _check_opset(opset: int) -> None:
    """Raise MissingExtra without the packages, ConfigError for an opset that they do not write."""
    try:
        import onnx
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError as error:
        raise MissingExtra("exporting", f"{error.name}", "export") from error
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        word = "old" if opset < OLDEST_OPSET else "new"
        raise ConfigError(f"opset {opset} is too {word}: give one from {OLDEST_OPSET} to {newest}.")


def exported_program(
    net: DualBranch, drawn: Drawn, resize: PillowResize | None, *, halved: bool = False
) -> ExportedProgram:
    """Return the program that computes `OUTPUTS` from `image`, for any number of images."""
    if resize is None:
        image, sizes = net.example.repeat(2, 1, 1, 1), {0: Dim("N")}
    else:
        image = torch.zeros(2, 300, 400, net.input_shape[0], dtype=torch.uint8, device=net.device)
        sizes = {0: Dim("N"), 1: Dim("H"), 2: Dim("W")}
    try:
        with torch.inference_mode(False), torch.no_grad(), _quiet():
            module = ExportedNetwork(net, drawn, resize, halved).eval()
            return torch.export.export(module, (image,), dynamic_shapes={"image": sizes}, strict=False)
    except SigcamError:
        raise
    except Exception as error:  # any user network, any failure
        if is_out_of_memory(error):
            raise
        raise _unexported(error) from error


def onnx_bytes(program: ExportedProgram, about: dict[str, Any], opset: int) -> bytes:
    """Return the program as the bytes of an ONNX file with the description in its metadata."""
    try:
        with _quiet():
            onnx_program: Any = torch.onnx.export(
                program, dynamo=True, opset_version=opset, output_names=OUTPUTS, verbose=False
            )
    except Exception as error:  # any user network, any failure
        if is_out_of_memory(error):
            raise
        raise _unexported(error.__cause__ or error) from error
    texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in about.items()}
    onnx_program.model.metadata_props.update(texts)
    model = onnx_program.model_proto
    _name_sizes(model)
    _forget_places(model.graph)
    if model.ByteSize() > LARGEST_FILE:
        raise ConfigError("the file would be larger than 2 GB, which ONNX does not hold: use format='torch'.")
    return bytes(model.SerializeToString())


def _unexported(error: BaseException) -> AttachError:
    return AttachError(
        f"this network cannot be exported ({error_line(error)}): let its forward be one graph of usual "
        "layers that does not depend on numbers in tensors, or draw maps with sigcam.explain."
    )


def _name_sizes(model: Any) -> None:
    """Call the number of images N in inputs and outputs, and their height and width H and W."""
    shape = model.graph.input[0].type.tensor_type.shape.dim
    symbols = [dim.dim_param for dim in shape if dim.dim_param]
    names = dict(zip(symbols, "NHW", strict=False))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def _forget_places(graph: Any) -> None:
    """Remove the exporter's notes on source lines: they name folders of this machine."""
    for each in (*graph.node, *graph.input, *graph.output, *graph.value_info):
        del each.metadata_props[:]
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.HasField("g"):
            _forget_places(attribute.g)


def description(
    net: DualBranch, drawn: Drawn, resize: PillowResize | None, precision: FilePrecision = "float32"
) -> dict[str, Any]:
    """Return the metadata of a file; in ONNX, values that are no text are JSON."""
    import onnx

    p = net.transform if isinstance(net.transform, Preprocess) else None
    return {
        "sigcam_version": versions()["sigcam"],
        "torch_version": torch.__version__,
        "onnx_version": onnx.__version__,
        "class_names": list(net.class_names) if net.class_names else None,
        "k": drawn.k,
        "classes": list(drawn.classes) if drawn.classes else None,
        "scale": drawn.scale,
        "threshold": drawn.threshold,
        "precision": precision,
        "calibration": net.calibration.to_json(),
        "preprocessing": "inside" if resize else "outside",
        "preprocess": asdict(p) if p else None,
        "mean": list(p.mean) if p else None,
        "std": list(p.std) if p else None,
        "input_size": list(net.input_shape),
        "classifier_fingerprint": fingerprint(net.original),
        "branch_fingerprint": fingerprint(net.sigmoid),
    }


class _quiet(warnings.catch_warnings):
    """Silence the warnings and the log of the exporters."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        self._levels = [(each, each.level) for each in map(logging.getLogger, ("torch.onnx", "onnxscript"))]
        for logger, _ in self._levels:
            logger.setLevel(logging.ERROR)
        return entered

    def __exit__(self, *error: Any) -> None:
        for logger, level in self._levels:
            logger.setLevel(level)
        super().__exit__(*error)
