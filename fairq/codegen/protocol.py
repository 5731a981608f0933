"""The messages between sqlc and a process plugin, in protobuf and in its JSON form.

sqlc sends one `GenerateRequest` and reads one `GenerateResponse`, both in the plugin's `format` (`json`, or
by default protobuf). The messages are built from their description when the module is loaded.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message, message_factory

from fairq.codegen.model import GenerationError

# Only what templates need, because protobuf and the JSON reader skip unknown fields.
# sqlc writes `params`, but the canonical JSON name of that field is `parameters`. The reader takes both.
_PROTO = """
message File { string name = 1; bytes contents = 2; }
message Settings { string version = 1; string engine = 2; repeated string queries = 4; }
message Catalog { string default_schema = 2; repeated Schema schemas = 4; }
message Schema {
  string comment = 1; string name = 2; repeated Table tables = 3; repeated Enum enums = 4;
  repeated CompositeType composite_types = 5;
}
message CompositeType { string name = 1; string comment = 2; }
message Enum { string name = 1; repeated string vals = 2; string comment = 3; }
message Table { Identifier rel = 1; repeated Column columns = 2; string comment = 3; }
message Identifier { string catalog = 1; string schema = 2; string name = 3; }
message Column {
  string name = 1; bool not_null = 3; bool is_array = 4; string comment = 5;
  Identifier table = 10; Identifier type = 12; Identifier embed_table = 14; string original_name = 15;
  int32 array_dims = 17;
}
message Query {
  string text = 1; string name = 2; string cmd = 3; repeated Column columns = 4;
  repeated Parameter params = 5 [json_name = "parameters"]; repeated string comments = 6; string filename = 7;
  Identifier insert_into_table = 8;
}
message Parameter { int32 number = 1; Column column = 2; }
message GenerateRequest {
  Settings settings = 1; Catalog catalog = 2; repeated Query queries = 3; string sqlc_version = 4;
  bytes plugin_options = 5;
}
message GenerateResponse { repeated File files = 1; }
"""
_MESSAGE = re.compile(r"message (\w+) \{(.*?)\}", re.DOTALL)
_FIELD = re.compile(r'(repeated )?(\w+) (\w+) = (\d+)(?: \[json_name = "(\w+)"\])?;')


def _message_classes() -> tuple[type[message.Message], type[message.Message]]:
    fields = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="plugin/codegen.proto", package="plugin", syntax="proto3")
    for message_name, body in _MESSAGE.findall(_PROTO):
        described = file.message_type.add(name=message_name)
        for repeated, type_, name, number, json_name in _FIELD.findall(body):
            label = fields.LABEL_REPEATED if repeated else fields.LABEL_OPTIONAL
            field = described.field.add(
                name=name, number=int(number), label=label, json_name=json_name or name
            )
            if type_[0].isupper():
                field.type, field.type_name = fields.TYPE_MESSAGE, f".plugin.{type_}"
            else:
                field.type = fields.Type.Value(f"TYPE_{type_.upper()}")
    # A pool of our own, because another library may describe the same names in the default one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    by_name = message_factory.GetMessageClass
    return (
        by_name(pool.FindMessageTypeByName("plugin.GenerateRequest")),
        by_name(pool.FindMessageTypeByName("plugin.GenerateResponse")),
    )


_GenerateRequest, _GenerateResponse = _message_classes()


def is_json(data: bytes) -> bool:
    """Whether a message is JSON: a protobuf message never begins with a brace."""
    return data[:1] == b"{"


def read_request(data: bytes) -> Any:
    """The request; `Any` because the message's attributes exist only at run time."""
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
    return response.SerializeToString()  # type: ignore[no-any-return]
