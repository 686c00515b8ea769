"""What a running server has to give before anything of a run is asked of it; each raises ConfigError."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decode.common.errors import ConfigError
from decode.common.run_folder import free_disk_check
from distill.runtimes.engine_passes import EnginePasses, bytes_of_states
from distill.runtimes.http_client import refusing
from distill.runtimes.serve_command import serve_command
from distill.runtimes.states_check import fault_of_p, fault_of_probe
from distill.runtimes.states_file import take_states
from distill.runtimes.vllm_probe import check_tokens, served_log_p
from distill.runtimes.vllm_server import VllmServer

if TYPE_CHECKING:
    from distill.runtimes.served_runtime import ServedRuntime


def check_servers(runtime: ServedRuntime) -> None:
    """All of it."""
    tokenizer = runtime.target.tokenizer
    assert tokenizer is not None
    with refusing():
        for server in runtime.servers:
            check_tokens(server, tokenizer, runtime.target.path)
            check_room(runtime, server)
        check_states(runtime)
        runtime.remember()
        if runtime.config.responses == "target":
            check_writing(runtime)


def check_room(runtime: ServedRuntime, server: VllmServer) -> None:
    """Texts of the run fit."""
    needed = runtime.longest + (server is runtime.reader)  # a token is sampled behind each text, and thrown away
    if server.max_model_len < needed:
        raise ConfigError(
            f"the server at {server.url} takes texts of {server.max_model_len} tokens, and the run's longest one "
            f"may have {needed}; start it with --max-model-len {needed}, or use fewer sampling.max_new_tokens"
        )


def check_states(runtime: ServedRuntime) -> None:
    """Before anything is written: states come, appear here, and are those of this checkpoint, as is p."""
    kept = runtime.config.records.features.layers
    passes = EnginePasses(runtime, kept)
    command = serve_command(runtime, passes.asked)
    _, file = runtime.reader.complete(runtime.probe, 1, temperature=0.0)
    if file is None:
        raise ConfigError(
            f"the server at {runtime.reader.url} gives no hidden states, of which p is made; start it by\n{command}"
        )
    if not runtime.reader.appears(file):
        raise ConfigError(
            f"the server at {runtime.reader.url} wrote hidden states to a file {file.name}, and in "
            f"target.states_folder={runtime.states_folder} none appeared: it is not the folder of "
            "its shared_storage_path, or not shared with this machine, or its disk is full (see the server's log)"
        )
    states = take_states(file)["hidden_states"]
    fault = fault_of_probe(passes, states, runtime.probe)
    if fault is not None:
        raise ConfigError(f"the server at {runtime.reader.url} gives {fault}; start it by\n{command}")
    free_disk_check(runtime.states_folder, bytes_of_states(runtime, kept))
    for server in runtime.servers:
        log_p = served_log_p(server, runtime.probe)
        fault = fault_of_p(passes, states, runtime.probe, log_p, f"the server at {server.url}")
        if fault is not None:
            raise ConfigError(f"{fault}. Start it by\n{command}")


def check_writing(runtime: ServedRuntime) -> None:
    """A response of one token, as the run asks for them."""
    if runtime.writer is not runtime.reader and runtime.writer.complete(runtime.probe[:2], 1)[1] is not None:
        raise ConfigError(
            f"the server at target.url={runtime.writer.url} gives hidden states as well as that at target.states_url: "
            "it writes slowly, and nobody would remove its files. Start it without, or leave target.states_url out"
        )
    call = runtime.asked() | {"prompts": [runtime.probe[:2]], "seeds": [0], "max_new_tokens": 1}
    runtime.engine("write").call(call)
