"""A model repository of NVIDIA Triton: the file, how to serve it, and the names of the classes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigcam.core.errors import ConfigError

MOST_IMAGES = 8  # that the server joins into one batch
TYPES = {"FLOAT": "TYPE_FP32", "INT64": "TYPE_INT64", "BOOL": "TYPE_BOOL", "UINT8": "TYPE_UINT8"}


def write_model_repository(folder: Path, data: bytes, class_names: Sequence[str] | None) -> None:
    """Write FOLDER/1/model.onnx, FOLDER/config.pbtxt and FOLDER/labels.txt, whole or not at all."""
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a new folder inside the model repository.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}-{os.getpid()}.part")
    try:
        (draft / "1").mkdir(parents=True)
        (draft / "1" / "model.onnx").write_bytes(data)
        (draft / "config.pbtxt").write_text(triton_config(folder.name, data))
        if class_names:
            lines = (" ".join(name.split()) for name in class_names)
            (draft / "labels.txt").write_text("\n".join(lines) + "\n")
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def triton_config(name: str, data: bytes) -> str:
    """Return the text of config.pbtxt for an ONNX file of this name; the first axis is the batch."""
    import onnx

    model = onnx.load_from_string(data)
    named = any(each.key == "class_names" and each.value != "null" for each in model.metadata_props)
    lines = [f"name: {json.dumps(name)}", 'platform: "onnxruntime_onnx"', f"max_batch_size: {MOST_IMAGES}"]
    lines += [_tensor("input", each, False) for each in model.graph.input]
    lines += [_tensor("output", each, named and each.name == "probability") for each in model.graph.output]
    return "\n".join([*lines, "dynamic_batching { }"]) + "\n"


def _tensor(kind: str, value: Any, labelled: bool) -> str:
    """An input or output, with -1 for sizes that vary."""
    import onnx

    tensor = value.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim][1:]
    element = TYPES[onnx.TensorProto.DataType.Name(tensor.elem_type)]
    fields = [f'name: "{value.name}"', f"data_type: {element}", f"dims: {sizes}"]
    fields += ['label_filename: "labels.txt"'] if labelled else []
    return f"{kind} {{\n  " + "\n  ".join(fields) + "\n}"
