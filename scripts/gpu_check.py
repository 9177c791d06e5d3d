"""Checks that only mean something on a GPU: `python scripts/gpu_check.py --op step --op demo` on a machine with one.

step: the mixed decode + prefill program of the demo keeps its pools in place: no copy of a pool in the optimised
program, temporary memory below one layer of the smallest pool.
demo: the demo (without thinking) in bf16 on the GPU gives the answers it gives in float32 on the CPU of the same
machine, wherever the CPU's smallest margin between the two best tokens exceeds 0.5. The other answers may differ by
rounding and are only counted.
kda-decode, kda-verify (with commit), short-conv: every case of their `*_cases.py` in `k3jax/pallas/`, fresh random
inputs, poisoned pools, against float64; for decode also slots beyond 2^31 elements and 10,000 steps.
draft-attend: every case of `k3jax/pallas/draft_attend_cases.py`, NaN wherever no row looks, against float64.
slot-copy: every case of `k3jax/pallas/slot_copy_cases.py`, every bit of both pools.
kda-prefill: every case of `k3jax/pallas/kda_cases.py`, fresh random inputs, every tiling, against float64; exports bit
for bit. kda-prefill-op: the same kernels behind the step's op, every case of `k3jax/pallas/kda_prefill_op_cases.py`.
mla-decode: every case of `k3jax/pallas/mla_decode_cases.py` against float64, the same bits in other lanes, a pool of
more than 2^31 elements, and the ops of decode and verify beside the XLA references.
attn-res, experts, experts-triton, gemm, moe-tail, router, sampling: every case of their `*_cases.py`, fresh random
inputs, against float64 and in every integer; for experts also weight stacks beyond 2^31 bytes, for gemm 2^31 elements.
golden-moe: router, experts and tail on every MoE layer of `tests/data/tiny8_mxfp4`, fed the published inputs: the same
ids as in float64, sums within bfloat16 rounding.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from k3jax.compiler_flags import keep_loops_on_the_gpu  # noqa: E402
from k3jax.pallas.dispatch import Kernels  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

MARGIN = 0.5
QUESTIONS = ROOT / "demo" / "questions.jsonl"
KERNEL_CHECKS = {  # function of a file in scripts/checks
    "kda-decode": ("kda_decode", "check_decode"),
    "kda-prefill": ("kda_prefill", "check_kda_prefill"),
    "kda-prefill-op": ("kda_prefill", "check_kda_prefill_op"),
    "kda-verify": ("kda_decode", "check_verify"),
    "short-conv": ("kda_decode", "check_conv"),
    "experts": ("experts", "check_experts"),
    "experts-triton": ("experts_triton", "check_experts_triton"),
    "draft-attend": ("draft_attend", "check_draft_attend"),
    "golden-moe": ("golden_moe", "check_golden_moe"),
    "attn-res": ("attn_res", "check_attn_res"),
    "mla-decode": ("mla_decode", "check_mla_decode"),
    "moe-tail": ("moe_tail", "check_moe_tail"),
    "router": ("router", "check_router"),
    "gemm": ("small_gemm", "check_small_gemm"),
    "sampling": ("sampling", "check_sampling"),
    "slot-copy": ("kda_decode", "check_slot_copy"),
}
HAVE_SMALL = tuple(op for op in KERNEL_CHECKS if op != "experts-triton")
GROUPS = {
    "kda": ("kda-decode", "kda-verify", "slot-copy", "short-conv", "kda-prefill", "kda-prefill-op"),
    "moe": ("router", "experts", "moe-tail", "golden-moe"),
}


def main() -> int:
    """Run the checks asked for; exit status 1 when one fails."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--op",
        action="append",
        choices=("step", "demo", *KERNEL_CHECKS, *GROUPS),
        help="check to run, or kda or moe for all of their kernels; repeat for several",
    )
    parser.add_argument(
        "--small", action="store_true", help=f"only small cases, for a memory checker: of {', '.join(HAVE_SMALL)}"
    )
    parser.add_argument("--kernels", choices=("auto", "xla", "pallas"), default="auto", help="of step and demo")
    parser.add_argument("--questions", type=whole(1), default=50, help="known questions to ask (default: 50)")
    parser.add_argument("--answer", metavar="DTYPE", help=argparse.SUPPRESS)  # one side of `demo`, in its own process
    args = parser.parse_args()
    keep_loops_on_the_gpu()  # as the server does
    if args.answer:
        return answer(args.answer, args.questions, args.kernels)
    if not args.op:
        parser.error("name a check with --op")
    checks = {
        "step": lambda: check_step(args.kernels),
        "demo": lambda: check_demo(args.questions, args.kernels),
    }
    ops = [single for op in args.op for single in GROUPS.get(op, (op,))]
    if args.small and (others := [op for op in ops if op not in HAVE_SMALL]):
        parser.error(f"{others[0]} has no small cases. Name some of {', '.join(HAVE_SMALL)}")
    results = [checks[op]() if op in checks else check_kernel(op, args.small) for op in ops]
    return 0 if all(results) else 1


def check_kernel(op: str, only_small: bool = False) -> bool:
    """Run the cases of one kernel, or of one of `HAVE_SMALL` the small ones."""
    sys.path.insert(0, str(ROOT / "scripts"))
    module, function = KERNEL_CHECKS[op]
    check = getattr(importlib.import_module(f"checks.{module}"), function)
    return check(only_small=True) if only_small else check()


def check_step(kernels: Kernels) -> bool:
    """Compile the mixed program for big pools and read it."""
    import jax
    import jax.numpy as jnp

    from k3jax import cache, params, presets
    from k3jax.pallas import dispatch, expert_load
    from k3jax.program_text import ArrayType, parse, pool_copies
    from k3jax.programs import StepProgram
    from k3jax.sharding.mesh import make_mesh, parallel_of

    mesh = make_mesh()
    shape = cache.CacheShape(num_rows=64, num_pages=20_001, num_slots=1025, pages_per_row=256)
    situation = dispatch.Situation.on(jax.devices()[0], config=presets.demo(), dtype=jnp.bfloat16)
    ops, tree = dispatch.choose(situation, kernels)[0], params.abstract(presets.demo())
    program = StepProgram(
        config=presets.demo(),
        cache_shape=shape,
        tree=expert_load.repacked_tree(tree) if dispatch.wants_repacked_experts(ops) else tree,
        dtype=jnp.bfloat16,
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
    )
    compiled = program.compile(program.shape_of(rows=64, prefill_tokens=512))
    pools = cache.pool_shapes(program.config, shape, program.dtype)
    names = {"bfloat16": "bf16", "float32": "f32"}
    types = [ArrayType(names[pool.dtype.name], pool.shape) for pool in jax.tree.leaves(pools)]
    copies = pool_copies(parse(compiled.as_text()), types)
    memory = compiled.memory_analysis()
    sizes = [math.prod(pool.shape[1:]) * pool.dtype.itemsize for pool in (pools.mla, pools.kda)]
    is_small = memory.temp_size_in_bytes < min(sizes)
    print(
        f"step on {jax.devices()[0].device_kind}: {len(copies)} pool copies, "
        f"{memory.temp_size_in_bytes / 1e6:.0f} MB of temporaries "
        f"against {min(sizes) / 1e6:.0f} MB for one layer of the smaller pool"
    )
    for instruction in copies:
        print(f"  {instruction.opcode} {instruction.results} in {instruction.scope}")
    return not copies and is_small


def check_demo(num_questions: int, kernels: Kernels) -> bool:
    """Ask both sides and compare where the CPU was sure."""
    sides = {name: _ask(name, num_questions, kernels) for name in ("float32", "bfloat16")}
    sure = [i for i, reply in enumerate(sides["float32"]) if reply["margin"] > MARGIN]
    same = [i for i, reply in enumerate(sides["float32"]) if reply["token_ids"] == sides["bfloat16"][i]["token_ids"]]
    wrong = sorted(set(sure) - set(same))
    print(
        f"demo, kernels {kernels}: {len(same)} of {num_questions} answers equal; {len(sure)} had a smallest margin "
        f"above {MARGIN} on the CPU, {len(sure) - len(wrong)} of those are equal"
    )
    for i in wrong:
        print(f"  {sides['float32'][i]['question']}: {sides['float32'][i]['text']} / {sides['bfloat16'][i]['text']}")
    return not wrong


def _ask(dtype: str, num_questions: int, kernels: Kernels) -> list[dict]:
    environment = dict(os.environ)
    if dtype == "float32":
        environment["JAX_PLATFORMS"], kernels = "cpu", "xla"
    command = [sys.executable, __file__, "--answer", dtype, "--questions", str(num_questions), "--kernels", kernels]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def answer(dtype: str, num_questions: int, kernels: Kernels) -> int:
    """Print one JSON line per known question: ids, text and the smallest margin between the two best tokens."""
    from k3jax.chat import load_chat_literals, render_chat
    from serving.llm import LLM

    lines = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    questions = [line["question"] for line in lines if line["split"] == "train"][:num_questions]
    with LLM("demo", dtype=dtype, kernels=kernels, max_num_seqs=32, max_step_tokens=512, max_model_len=1024) as llm:
        literals, tokenizer = load_chat_literals(ROOT / "demo"), llm._require_tokenizer()
        prompts = [
            render_chat(tokenizer, [{"role": "user", "content": q}], literals=literals, thinking=False)
            for q in questions
        ]
        replies = llm.generate(prompts, max_tokens=160, temperature=0.0, logprobs=2)
    for question, reply in zip(questions, replies, strict=True):
        margins = [step.top[0][1] - step.top[1][1] for step in reply.logprobs]
        line = {"question": question, "token_ids": list(reply.token_ids), "text": reply.text, "margin": min(margins)}
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
