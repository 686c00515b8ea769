"""llama.cpp's server with a target in GGUF, until its standard input ends; run by the interpreter of .venv-llamacpp.

    llamacpp_server.py TARGET

Standard output gets a line, its address.
"""

import sys

import xllamacpp  # pyright: ignore[reportMissingImports]


def main() -> None:
    """As `llama-server -m TARGET -c 512 --parallel 2 -fa off` does, in float32."""
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.port, params.verbosity = 512, 2, 0, 1
    params.warmup, params.fit_params = False, False
    # its flash attention reads keys and values in float16, whatever the cache holds
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads, params.n_gpu_layers = 1, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    main()
