"""A Triton model folder: its configuration is protobuf text with Triton's fields."""

import io
from pathlib import Path
from typing import Any

import pytest

from sigcam.core.errors import ConfigError
from sigcam.deployment.triton import write_model_repository

onnx = pytest.importorskip("onnx")
FIELDS = {  # name, number, kind: of Triton's public model_config.proto, those that are written
    "ModelTensor": [("name", 1, "string"), ("data_type", 2, "DataType"), ("dims", 3, "int64*")],
    "ModelOutput": [("name", 1, "string"), ("data_type", 2, "DataType"), ("dims", 3, "int64*")],
    "ModelDynamicBatching": [],
    "ModelConfig": [
        ("name", 1, "string"),
        ("platform", 2, "string"),
        ("max_batch_size", 4, "int32"),
        ("input", 5, "ModelTensor*"),
        ("output", 6, "ModelOutput*"),
        ("dynamic_batching", 11, "ModelDynamicBatching"),
    ],
}
FIELDS["ModelOutput"] = [*FIELDS["ModelOutput"], ("label_filename", 4, "string")]
DATA_TYPES = {"TYPE_BOOL": 1, "TYPE_UINT8": 2, "TYPE_INT64": 9, "TYPE_FP32": 11}


def config_class() -> Any:
    """The message ModelConfig, from FIELDS."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="config.proto", syntax="proto3")
    kinds = file.enum_type.add(name="DataType")
    kinds.value.add(name="TYPE_INVALID", number=0)
    for name, number in DATA_TYPES.items():
        kinds.value.add(name=name, number=number)
    scalar = descriptor_pb2.FieldDescriptorProto
    for message, fields in FIELDS.items():
        made = file.message_type.add(name=message)
        for name, number, kind in fields:
            field = made.field.add(name=name, number=number, label=3 if kind.endswith("*") else 1)
            kind = kind.rstrip("*")
            if kind in ("string", "int32", "int64"):
                field.type = getattr(scalar, f"TYPE_{kind.upper()}")
            else:
                field.type = scalar.TYPE_ENUM if kind == "DataType" else scalar.TYPE_MESSAGE
                field.type_name = f".{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ModelConfig"))


def small_file() -> bytes:
    """A file with one input and two outputs of the kinds that are exported."""
    make = onnx.helper.make_tensor_value_info
    image = make("image", onnx.TensorProto.UINT8, ["N", "H", "W", 3])
    outputs = [
        make("probability", onnx.TensorProto.FLOAT, ["N", 4]),
        make("present", onnx.TensorProto.BOOL, ["N", 2]),
    ]
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [image], outputs))
    onnx.helper.set_model_props(model, {"class_names": '["cat"]'})
    data = io.BytesIO()
    onnx.save(model, data)
    return data.getvalue()


def test_a_model_folder_has_what_triton_reads(tmp_path: Path):
    from google.protobuf import text_format

    folder = tmp_path / "repository" / "pets"
    write_model_repository(folder, small_file(), ["a cat", "a\ndog"])
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["1/model.onnx", "config.pbtxt", "labels.txt"]
    assert (folder / "labels.txt").read_text() == "a cat\na dog\n"
    config = text_format.Parse((folder / "config.pbtxt").read_text(), config_class()())
    assert (config.name, config.platform, config.max_batch_size) == ("pets", "onnxruntime_onnx", 8)
    (image,) = config.input
    assert (image.name, list(image.dims), image.data_type) == ("image", [-1, -1, 3], DATA_TYPES["TYPE_UINT8"])
    assert [(each.name, list(each.dims), each.label_filename) for each in config.output] == [
        ("probability", [4], "labels.txt"),
        ("present", [2], ""),
    ]


def test_a_folder_that_exists_is_kept(tmp_path: Path):
    with pytest.raises(ConfigError, match="exists"):
        write_model_repository(tmp_path, small_file(), None)
    assert not any(tmp_path.iterdir())
