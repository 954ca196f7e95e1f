"""Hold our engine hash chains against the engines' own code, on random token sequences.

Downloads the published wheels (400 MB in all; `--wheels` keeps them), takes the few functions that hash out of them, and runs these
beside ours. SGLang's is C++ and needs g++ and OpenSSL's headers, else it is left out and said so. Exits 0 if all hashes are equal.
Golden vectors (`tests/golden/engine_chains.json`) are made the same way; this is for taking up a new release.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from array import array
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
from command_line import Parser, one_or_more, run_tool, zero_or_more

from kvobj.ids.engine_chains import aibrix, lmcache, sglang, vllm

RELEASES: Final = {"lmcache": "0.5.6", "vllm": "0.33.0", "sglang": "0.5.23", "aibrix-kvcache": "0.8.0"}
_SOME: Final = 0.2
_HALF: Final = 0.5
SEED_VARIABLE: Final = "PYTHONHASHSEED"
Scope = dict[str, Any]


class Wheels:
    """Published packages in a folder, downloaded on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, package: str) -> Path:
        """The wheel of a package of `RELEASES`."""
        found = sorted(self.folder.glob(f"{package.replace('-', '_')}-{RELEASES[package]}-*.whl"))
        if not found:
            self.pip("download", "--no-deps", "--dest", str(self.folder), f"{package}=={RELEASES[package]}")
            found = sorted(self.folder.glob(f"{package.replace('-', '_')}-{RELEASES[package]}-*.whl"))
        return found[0]

    def source(self, package: str, file: str) -> str:
        """The text of a file in it."""
        with zipfile.ZipFile(self.path(package)) as archive:
            return archive.read(file).decode()

    def scope(self, package: str, file: str, names: Collection[str], known: Scope) -> Scope:
        """The named functions, classes and constants of a file, defined in a scope that has `known` in place of its imports."""
        tree = ast.parse(self.source(package, file))
        tree.body = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0)] + [
            node for node in tree.body if _defines(node) & set(names)
        ]
        scope: Scope = {"__name__": file, "Any": object, "Optional": object, **known}
        exec(compile(ast.fix_missing_locations(tree), file, "exec"), scope)  # noqa: S102 - that is what it is for
        return scope

    @staticmethod
    def pip(*arguments: str) -> None:
        """Run pip of this environment, whatever seed is set for an engine: Python itself takes only some."""
        environment = {name: value for name, value in os.environ.items() if name != SEED_VARIABLE}
        command = [sys.executable, "-m", "pip", "--quiet", *arguments]
        subprocess.run(command, check=True, timeout=600, env=environment)


def _defines(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case _:
            return set()


def module_of(name: str, source: str, folder: Path) -> ModuleType:
    """A whole file as a module."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Cases:
    """Random sequences, and a count of the hashes that were equal. A difference ends the run."""

    def __init__(self, rounds: int, seed: int) -> None:
        self.rounds = rounds
        self.random = random.Random(seed)
        self.equal = 0

    def tokens(self, most: int, bound: int = 2**32) -> list[int]:
        """Some token ids, small and large ones."""
        draw = self.random.randrange
        return [draw(self.random.choice((300, bound))) for _ in range(draw(most))]

    def check(self, theirs: list[Any], ours: list[Any], what: str) -> None:
        """Count, or stop."""
        if theirs != ours:
            raise SystemExit(f"{what}: ours differ\n  theirs {theirs}\n  ours   {ours}")
        self.equal += len(ours)


def set_seed(seed: str | None) -> None:
    """What vLLM reads its seed from."""
    if seed is None:
        os.environ.pop(SEED_VARIABLE, None)
    else:
        os.environ[SEED_VARIABLE] = seed


def vllm_scope(wheels: Wheels, folder: Path) -> tuple[ModuleType, Scope]:
    """The hash functions of vLLM, and how it makes roots, extra keys and block hashes."""
    hashing = module_of("vllm_hashing", wheels.source("vllm", "vllm/utils/hashing.py"), folder)
    names = {
        "generate_block_hash_extra_keys", "_gen_mm_extra_hash_keys", "_gen_lora_extra_hash_keys",
        "_gen_prompt_embeds_extra_hash_keys", "hash_block_tokens", "resolve_none_hash_seed", "init_none_hash",
        "DEFAULT_NONE_HASH_SEED", "_NON_CRYPTO_HASH_FUNCTIONS",
    }  # fmt: skip
    known: Scope = {
        "BlockHash": bytes, "os": os, "hashlib": hashlib, "xxhash": hashing.xxhash, "xxhash_cbor": hashing.xxhash_cbor,
        "logger": SimpleNamespace(warning=lambda *_: None),
    }  # fmt: skip
    return hashing, wheels.scope("vllm", "vllm/v1/core/kv_cache_utils.py", names, known)


def check_vllm(wheels: Wheels, folder: Path, cases: Cases) -> None:
    """Four algorithms, adapters, multimodal items, salts, prompt embeddings, seeds."""
    hashing, scope = vllm_scope(wheels, folder)
    pick, chance = cases.random.choice, cases.random.random
    algorithms: tuple[vllm.Algorithm, ...] = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
    for _ in range(cases.rounds):
        step, tokens, algorithm = pick((1, 2, 4, 16)), cases.tokens(70), pick(algorithms)
        seed = pick(("0", "42") if algorithm.startswith("xx") else (None, "", "0", "ä"))
        ends = range(0, len(tokens) // step * step, step)
        extras = vllm.Extras(
            adapter=pick((None, ("a", "/p"), ("ä", "p"))),
            items=_items(cases),
            cache_salt=pick(("", "s", "ü")),
            prompt_embeds={start: hashlib.sha256(bytes([start])).digest() for start in ends}
            if chance() < _SOME
            else {},
        )
        request = SimpleNamespace(
            lora_request=extras.adapter and SimpleNamespace(lora_name=extras.adapter[0], lora_path=extras.adapter[1]),
            cache_salt=extras.cache_salt,
            mm_features=[SimpleNamespace(identifier=each.identifier, mm_position=each) for each in extras.items],
            prompt_embeds=extras.prompt_embeds or None,
            _prompt_embeds_per_block_hashes={(at, at + step): each for at, each in extras.prompt_embeds.items()},
        )
        set_seed(seed)
        function = hashing.get_hash_fn_by_name(algorithm)
        scope["init_none_hash"](function)
        theirs: list[bytes] = []
        item = 0
        for start in ends:
            extra, item = scope["generate_block_hash_extra_keys"](request, start, start + step, item)
            parent = theirs[-1] if theirs else None
            theirs.append(scope["hash_block_tokens"](function, parent, tokens[start : start + step], extra))
        ours = vllm.block_hashes(tokens, block_tokens=step, algorithm=algorithm, seed=seed, extras=extras)
        cases.check(theirs, ours, f"vLLM {algorithm}")


def _items(cases: Cases) -> tuple[vllm.Item, ...]:
    items: list[vllm.Item] = []
    at = 0
    while cases.random.random() < _HALF:
        at += cases.random.randrange(9)
        length = cases.random.randrange(1, 20)
        items.append(vllm.Item(cases.random.choice(("image", "x" * 40)), at, length))
        at += length
    return tuple(items)


def check_lmcache(wheels: Wheels, folder: Path, cases: Cases) -> None:
    """The multi-process server's hasher, and the token database over vLLM's functions."""
    quiet = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    names = {"_make_blake3_hash_func", "TokenHasher"}
    known = {"Callable": Callable, "os": os, "logger": quiet}
    hasher = wheels.scope("lmcache", "lmcache/v1/multiprocess/token_hasher.py", names, known)["TokenHasher"]
    for _ in range(cases.rounds // 10):
        step, tokens = cases.random.choice((1, 3, 256)), cases.tokens(1200)
        theirs = hasher(step)
        cases.check([theirs.none_hash], [lmcache.mp_root()], "LMCache's root")
        ours = lmcache.mp_chunk_hashes(tokens, chunk_tokens=step)
        cases.check(theirs.compute_chunk_hashes(tokens), ours, "LMCache, multi-process")
    hashing, scope = vllm_scope(wheels, folder)
    fold = wheels.scope(
        "lmcache", "lmcache/v1/token_database.py", {"_normalize_hash_to_int"}, {"Union": {(int, bytes): 0}}
    )
    algorithms: tuple[vllm.Algorithm, ...] = ("sha256", "sha256_cbor")
    for _ in range(cases.rounds // 10):
        tokens, algorithm, seed = cases.tokens(90), cases.random.choice(algorithms), cases.random.choice((None, "0"))
        set_seed(seed)
        function = hashing.get_hash_fn_by_name(algorithm)
        scope["init_none_hash"](function)
        parent = fold["_normalize_hash_to_int"](scope["NONE_HASH"])
        root = lmcache.in_process_root(algorithm, seed=seed)
        chain = [parent]
        for at in range(0, len(tokens), 8):  # as `_canonicalize_hash_inputs` lays the triple out
            parent = fold["_normalize_hash_to_int"](function((parent, tuple(tokens[at : at + 8]), ())))
            chain.append(parent)
        folded = lmcache.in_process_chunk_hashes(
            tokens, algorithm=algorithm, root=root, chunk_tokens=8, save_unfull_chunk=True
        )
        cases.check(chain, [root, *folded], f"LMCache, in process, {algorithm}")


def check_aibrix(wheels: Wheels, folder: Path, cases: Cases) -> None:
    """Both hashing key builders, with the MD5 hasher of its tests."""
    del folder
    front = "aibrix_kvcache/l2/key_builders"
    combine = wheels.scope("aibrix-kvcache", "aibrix_kvcache/utils.py", {"hash_combine_128"}, {})
    md5 = wheels.scope("aibrix-kvcache", f"{front}/hasher.py", {"MD5Hasher"}, {"Hasher": object, "hashlib": hashlib})
    base = type("KeyBuilder", (), {"__init__": lambda self, size: setattr(self, "block_size", size)})
    known = {"KeyBuilder": base, "hash_combine_128": combine["hash_combine_128"]}
    builders = (
        ("rolling_hash_key_builder", "RollingHashKeyBuilder", aibrix.rolling_keys),
        ("simple_hash_key_builder", "SimpleHashKeyBuilder", aibrix.simple_keys),
    )
    for file, name, ours in builders:
        builder = wheels.scope("aibrix-kvcache", f"{front}/{file}.py", {name}, known)[name]
        for _ in range(cases.rounds // 10):
            step = cases.random.choice((1, 4, 16))
            tokens = cases.tokens(128, 2**31)
            data = np.array(tokens[: len(tokens) // step * step], dtype=np.int32)
            theirs = [key for _, key in builder(md5["MD5Hasher"](), step).build(None, _TokenView(data))]
            cases.check(theirs, ours(data.tolist(), block_tokens=step, hash_128=aibrix.md5_128), f"AIBrix {name}")


class _TokenView:
    """As much of AIBrix's TokenListView as its builders ask for."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self._data = data
        self._meta_ = SimpleNamespace()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, _: slice) -> None:
        return None

    def memoryview(self) -> memoryview:
        """All tokens."""
        return memoryview(self._data.data)


class _Bigrams:
    """As much of SGLang's bigram keys as its hash asks for."""

    is_bigram = True

    def __init__(self, tokens: list[int]) -> None:
        self.token_ids = tokens

    def __len__(self) -> int:
        return len(self.token_ids) - 1


def check_sglang(wheels: Wheels, folder: Path, cases: Cases) -> None:
    """Pages plain, of bigrams, with ids above u32, under namespaces; event integers."""
    front = "sglang/srt/mem_cache"
    native = _compiled(wheels.source("sglang", f"{front}/cpp_utils/hash_binding.cpp"), folder, wheels)
    known: Scope = {"array": array, "_load_native_hash_module": lambda: native}
    hashing = wheels.scope(
        "sglang", f"{front}/cpp_utils/native_hash.py", {"_native_hash_input", "get_native_hash"}, known
    )
    names = {"storage_namespace_seed", "get_hash_str", "hash_str_to_int64"}
    scope = wheels.scope("sglang", f"{front}/utils.py", names, {**hashing, "hashlib": hashlib})
    for _ in range(cases.rounds):
        pick = cases.random.choice
        tokens = [*cases.tokens(60, pick((2**32, 2**63))), 1, 2]
        step, bigram = pick((1, 4, 16)), pick((True, False))
        extra_key, salt = pick((None, "", "ä")), pick((None, "", "s"))
        seed = sglang.namespace_seed(extra_key=extra_key, cache_salt=salt)
        cases.check(
            [scope["storage_namespace_seed"](extra_key, salt)], [seed and seed.hex()], "SGLang's namespace seed"
        )
        theirs = scope["get_hash_str"](_Bigrams(tokens) if bigram else tokens, seed and seed.hex(), step)
        ours = sglang.page_hashes(tokens, page_tokens=step, parent=seed, bigram=bigram)
        cases.check(theirs, [digest.hex() for digest in ours], "SGLang's pages")
        integers = [sglang.event_integer(digest) for digest in ours]
        cases.check([scope["hash_str_to_int64"](each) for each in theirs], integers, "SGLang's event integers")


def _compiled(source: str, folder: Path, wheels: Wheels) -> ModuleType:
    name = "hicache_hash_cpp"
    wheels.pip("install", "--target", str(folder / "pybind11"), "pybind11")
    (folder / f"{name}.cpp").write_text(source)
    target = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = (folder / "pybind11" / "pybind11" / "include", sysconfig.get_paths()["include"])
    command = ["g++", "-O1", "-w", "-std=c++17", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={name}"]
    command += [*(f"-I{each}" for each in headers), str(folder / f"{name}.cpp"), "-o", str(target), "-lcrypto"]
    subprocess.run(command, check=True, timeout=300)
    spec = importlib.util.spec_from_file_location(name, target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKS: Final[dict[str, Callable[[Wheels, Path, Cases], None]]] = {
    "vllm": check_vllm,
    "lmcache": check_lmcache,
    "aibrix": check_aibrix,
    "sglang": check_sglang,
}


def main() -> int:
    """See the module's text."""
    parser = Parser(__doc__)
    parser.add_argument("engines", nargs="*", choices=[*CHECKS, []], help="which ones; default: all")
    parser.add_argument("--wheels", type=Path, help="where wheels lie, and are kept; default: a temporary folder")
    parser.add_argument("--rounds", type=one_or_more, default=3000, help="random sequences an engine")
    parser.add_argument("--seed", type=zero_or_more, default=1)
    arguments = parser.parse_args()
    skipped = False
    with tempfile.TemporaryDirectory(prefix="kvobj-engines-") as scratch:
        wheels = Wheels(arguments.wheels or Path(scratch))
        for engine in arguments.engines or CHECKS:
            cases = Cases(arguments.rounds, arguments.seed)
            try:
                CHECKS[engine](wheels, Path(scratch), cases)
            except (OSError, subprocess.SubprocessError, IndexError) as error:
                print(f"{engine}: left out: {error}")
                skipped = True
            else:
                print(f"{engine}: {cases.equal} equal")
    return 2 if skipped else 0


if __name__ == "__main__":
    run_tool(main)
