"""The messages sqlc and a process plugin exchange, in protobuf and in its JSON form.

sqlc sends one `GenerateRequest` on stdin and reads one `GenerateResponse` from stdout, both in the plugin's
`format` (`json`, or protobuf when none is named). Only the field numbers and names matter, so the messages
are described here as tables and built when the module is loaded: there is no generated protobuf code to
keep in step with a runtime.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message, message_factory

from fairq.codegen.model import GenerationError

# message: {field number: (name, type)}; a leading `*` is a repeated field, a capital letter another message.
# Fields that no template needs are left out: an unknown field is skipped by protobuf and by the JSON reader.
_MESSAGES: dict[str, dict[int, tuple[str, str]]] = {
    "File": {1: ("name", "string"), 2: ("contents", "bytes")},
    "Settings": {
        1: ("version", "string"),
        2: ("engine", "string"),
        3: ("schema", "*string"),
        4: ("queries", "*string"),
    },
    "Catalog": {
        1: ("comment", "string"),
        2: ("default_schema", "string"),
        3: ("name", "string"),
        4: ("schemas", "*Schema"),
    },
    "Schema": {
        1: ("comment", "string"),
        2: ("name", "string"),
        3: ("tables", "*Table"),
        4: ("enums", "*Enum"),
        5: ("composite_types", "*CompositeType"),
    },
    "CompositeType": {1: ("name", "string"), 2: ("comment", "string")},
    "Enum": {1: ("name", "string"), 2: ("vals", "*string"), 3: ("comment", "string")},
    "Table": {1: ("rel", "Identifier"), 2: ("columns", "*Column"), 3: ("comment", "string")},
    "Identifier": {1: ("catalog", "string"), 2: ("schema", "string"), 3: ("name", "string")},
    "Column": {
        1: ("name", "string"),
        3: ("not_null", "bool"),
        4: ("is_array", "bool"),
        5: ("comment", "string"),
        7: ("is_named_param", "bool"),
        8: ("is_func_call", "bool"),
        10: ("table", "Identifier"),
        12: ("type", "Identifier"),
        13: ("is_sqlc_slice", "bool"),
        14: ("embed_table", "Identifier"),
        15: ("original_name", "string"),
        17: ("array_dims", "int32"),
    },
    "Query": {
        1: ("text", "string"),
        2: ("name", "string"),
        3: ("cmd", "string"),
        4: ("columns", "*Column"),
        5: ("params", "*Parameter"),
        6: ("comments", "*string"),
        7: ("filename", "string"),
        8: ("insert_into_table", "Identifier"),
    },
    "Parameter": {1: ("number", "int32"), 2: ("column", "Column")},
    "GenerateRequest": {
        1: ("settings", "Settings"),
        2: ("catalog", "Catalog"),
        3: ("queries", "*Query"),
        4: ("sqlc_version", "string"),
        5: ("plugin_options", "bytes"),
        6: ("global_options", "bytes"),
    },
    "GenerateResponse": {1: ("files", "*File")},
}

# sqlc writes `params`; the canonical JSON name of that field is `parameters`. The reader takes both.
_JSON_NAMES = {("Query", "params"): "parameters"}


def _message_classes() -> tuple[type[message.Message], type[message.Message]]:
    fields = descriptor_pb2.FieldDescriptorProto
    scalar = {
        "string": fields.TYPE_STRING,
        "bytes": fields.TYPE_BYTES,
        "bool": fields.TYPE_BOOL,
        "int32": fields.TYPE_INT32,
    }
    file = descriptor_pb2.FileDescriptorProto(name="plugin/codegen.proto", package="plugin", syntax="proto3")
    for message_name, message_fields in _MESSAGES.items():
        described = file.message_type.add(name=message_name)
        for number, (name, type_) in message_fields.items():
            field = described.field.add(
                name=name,
                number=number,
                label=fields.LABEL_REPEATED if type_.startswith("*") else fields.LABEL_OPTIONAL,
                json_name=_JSON_NAMES.get((message_name, name), name),
            )
            element = type_.removeprefix("*")
            if element in scalar:
                field.type = scalar[element]
            else:
                field.type = fields.TYPE_MESSAGE
                field.type_name = f".plugin.{element}"
    # A pool of our own: another library may describe the same names in the default one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    by_name = message_factory.GetMessageClass
    return (
        by_name(pool.FindMessageTypeByName("plugin.GenerateRequest")),
        by_name(pool.FindMessageTypeByName("plugin.GenerateResponse")),
    )


_GenerateRequest, _GenerateResponse = _message_classes()


def is_json(data: bytes) -> bool:
    """Whether a message is in the JSON form. One of protobuf starts with a field's tag, never with a brace.

    The first byte alone decides: a tag may be a line break, and the length behind it a brace.
    """
    return data[:1] == b"{"


def read_request(data: bytes) -> Any:
    """The request; `Any` because the message's attributes exist at run time only."""
    request = _GenerateRequest()
    try:
        if is_json(data):
            json_format.Parse(data, request, ignore_unknown_fields=True)
        else:
            request.ParseFromString(data)
    except (json_format.ParseError, message.DecodeError, UnicodeDecodeError) as exc:
        raise GenerationError(
            f"the request on stdin cannot be read: {exc}",
            hint="sqlc starts this program as a process plugin; `fairq gen` generates without sqlc",
        ) from exc
    return request


def write_response(files: dict[str, str], *, json: bool) -> bytes:
    """The answer, in the form the request came in."""
    response: Any = _GenerateResponse()
    for name, contents in files.items():
        response.files.add(name=name, contents=contents.encode())
    if json:
        return json_format.MessageToJson(response, indent=None, preserving_proto_field_name=True).encode()
    serialised: bytes = response.SerializeToString()
    return serialised


def read_response(data: bytes) -> Any:
    """What `write_response` wrote; sqlc reads it, and so do tests."""
    response = _GenerateResponse()
    if is_json(data):
        json_format.Parse(data, response)
    else:
        response.ParseFromString(data)
    return response
