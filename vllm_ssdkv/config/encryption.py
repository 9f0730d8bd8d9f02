"""The ``encryption`` group of options: where the key of an encrypted store comes from."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from vllm_ssdkv.config.schema import PATH_TEXT, Allowed, OptionModel, PathText, Reason

_ONE = Reason("null: exactly one of the three must be given.")


def _variable(value: str) -> str:
    if not value or "=" in value or "\0" in value:
        raise ValueError("not the name of an environment variable")
    return value


def _command(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or not value[0] or any("\0" in word for word in value):
        raise ValueError("not a program and its arguments")
    return value


class EncryptionConfig(OptionModel):
    """Source of the key: exactly one of the fields is given. Holds no key."""

    key_file: Annotated[
        PathText | None,
        Allowed(PATH_TEXT),
        Field(
            description="File with the key, readable by its owner only (mode 0600 or 0400). A key "
            "is 32 random bytes, stored raw, as 64 hexadecimal digits or in base64."
        ),
        _ONE,
    ] = None
    key_env: Annotated[
        str | None,
        Field(
            description="Name of an environment variable with the key, in hexadecimal digits or "
            "base64."
        ),
        AfterValidator(_variable),
        _ONE,
    ] = None
    key_command: Annotated[
        tuple[str, ...] | None,
        Allowed('a list of texts such as ["vault", "kv", "get", "-field=key", "secret/ssdkv"]'),
        Field(
            strict=False,
            description="Program and arguments that print the key within 30 seconds. Each process "
            "of the engine runs it at start, without a shell.",
        ),
        AfterValidator(_command),
        _ONE,
    ] = None

    @model_validator(mode="after")
    def _exactly_one(self) -> EncryptionConfig:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'no key'} given; give exactly one of key_file, key_env "
                "and key_command"
            )
        return self
