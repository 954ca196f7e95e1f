"""Makes the profile that the codec `ek` needs of a model, from calibration chunks: once a model, offline, with torch.

    python tools/make_profile.py --kind kv --theta 500000 --out model.profile chunk-*.pt

Each file is `torch.save` of one tensor [layers, kinds, tokens, kv_heads, head_dim], keys after RoPE; `file.pt@4096` says that its
first token is at position 4096. Some thousand tokens of what the model will read do: a few times as many as heads by head_dim.
Prints the profile's digest, which frames name, and the key to PUT the file at in the namespace's bucket.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import torch
except ModuleNotFoundError:
    sys.exit("torch is not installed: make codec-env, and run this with .envs/codec/bin/python")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import Parser, output_file, run_tool

from kvobj.tensors.form import Kind, TensorForm
from kvobj.tensors.profiles import Profile, ProfileError, Rope, object_key
from kvobj.tensors.torch_profiles import make_profile


def profile_from_files(files: list[str], kind: Kind, theta: float | None) -> Profile:
    """The profile of the chunks in files, `path` or `path@first position`. `ProfileError`, OSError."""
    tensors, positions = [], []
    for file in files:
        path, _, position = file.partition("@")
        tensors.append(torch.load(path, weights_only=True))
        positions.append(int(position or 0))
    if tensors[0].ndim != len(("layers", "kinds", "tokens", "heads", "dim")):
        raise ProfileError(f"{files[0]}: wanted five axes, got {list(tensors[0].shape)}")
    layers, _kinds, tokens, heads, head_dim = tensors[0].shape
    form = TensorForm(kind, "bf16", layers, heads, head_dim, tokens)
    rope = Rope.of(theta, head_dim) if theta is not None else None
    return make_profile(tensors, form, rope, first_positions=positions)


def main() -> int:
    """The command."""
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE[@POSITION]")
    parser.add_argument("--kind", choices=("kv", "k", "v", "mla"), default="kv")
    parser.add_argument(
        "--theta", type=float, help="of unscaled half-split RoPE; none: keys are not turned by position"
    )
    parser.add_argument("--out", type=output_file, required=True)
    arguments = parser.parse_args()
    try:
        profile = profile_from_files(arguments.files, arguments.kind, arguments.theta)
    except (ProfileError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    arguments.out.write_bytes(profile.data)
    sys.stdout.write(f"{profile.digest.hex()}  {len(profile.data)} bytes; PUT it at {object_key(profile.digest)}\n")
    return 0


if __name__ == "__main__":
    run_tool(main)
