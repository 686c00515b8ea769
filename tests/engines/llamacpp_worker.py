"""llama.cpp's server with a target and a draft in GGUF; run by the interpreter of .venv-llamacpp.

    llamacpp_worker.py TARGET DRAFT SPEC_TYPE K NEW_TOKENS < PROMPTS

PROMPTS is JSON, a list of token ids each. Standard output gets {"texts", "metrics"}: the new tokens of each, greedily,
and what the server shows at /metrics after them.
"""

import json
import sys
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp  # pyright: ignore[reportMissingImports]


def serve(target: str, draft: str, spec_type: str, k: int) -> Any:
    """As `llama-server -m TARGET -md DRAFT --spec-type SPEC_TYPE --spec-draft-n-max K --metrics -fa off` does, in
    float32."""
    params = xllamacpp.CommonParams()
    params.model.path, params.speculative.draft.mparams.path = target, draft
    params.speculative.types = [xllamacpp.common_speculative_type[_name(spec_type)]]
    params.speculative.draft.n_max = k
    params.n_ctx, params.n_parallel, params.port, params.verbosity = 256, 1, 0, 1
    params.endpoint_metrics, params.warmup, params.fit_params = True, False, False
    # its flash attention reads keys and values in float16, whatever the cache holds
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for one in (params, params.speculative.draft):
        one.cache_type_k = one.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        one.cpuparams.n_threads, one.n_gpu_layers = 1, 0
    return xllamacpp.Server(params)


def _name(spec_type: str) -> str:
    return f"COMMON_SPECULATIVE_TYPE_{spec_type.replace('-', '_').upper()}"


def complete(address: str, prompt: list[int], new_tokens: int) -> list[int]:
    """New tokens of one text."""
    asked = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0.0, "ignore_eos": True}
    asked |= {"return_tokens": True, "cache_prompt": False}
    request = Request(f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return json.load(answer)["tokens"]


def main() -> None:
    """Write all texts."""
    target, draft, spec_type, k, new_tokens = sys.argv[1:]
    server = serve(target, draft, spec_type, int(k))
    address = server.listening_address
    texts = [complete(address, prompt, int(new_tokens)) for prompt in json.load(sys.stdin)]
    with urlopen(f"{address}/metrics") as answer:
        metrics = answer.read().decode()
    sys.stdout.write(json.dumps({"texts": texts, "metrics": metrics}))


if __name__ == "__main__":
    main()
