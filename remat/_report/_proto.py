"""Protobuf message classes from a few lines of text, for formats without a package."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def message_class(schema: str, package: str, name: str) -> Any:
    """Builds the class of one message.

    Args:
        schema: A line for each message, `Name: field=1 type, *repeated=2 Message`;
            it may go on in lines that start with two blanks. Repeated fields start
            with `*`; a type that is a message of the schema is written by its name.
        package: Name of the schema.
        name: The message.

    Returns:
        The class; what it reads may have more fields.
    """
    # A pool of our own: another reader may have loaded the format's own file.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file_descriptor(schema, package))
    descriptor = pool.FindMessageTypeByName(f"{package}.{name}")
    return message_factory.GetMessageClass(descriptor)


def _file_descriptor(schema: str, package: str) -> descriptor_pb2.FileDescriptorProto:
    Field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package.replace('.', '/')}.proto", package=package, syntax="proto3"
    )
    for line in schema.strip().replace("\n  ", " ").splitlines():
        name, fields = line.split(":", 1)
        message = file.message_type.add(name=name)
        for declaration in fields.split(","):
            left, kind = declaration.split()
            field_name, number = left.lstrip("*").split("=")
            field = message.field.add(name=field_name, number=int(number))
            repeated = left.startswith("*")
            field.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            if kind[0].isupper():
                field.type = Field.TYPE_MESSAGE
                field.type_name = f".{package}.{kind}"
            else:
                field.type = Field.Type.Value(f"TYPE_{kind.upper()}")
    return file
