"""Reading an optimised XLA program (`compiled.as_text()`, CPU or GPU) to prove what it does not do.

Questions: does it copy a pool, does a token mixer move rows about, how many collectives does it run, does it make
arrays larger than it should, does it wait for the host. Everything else in the text is ignored.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
ALIAS = re.compile(r"\{(\d+)\}: \((\d+), \{\}")
# Opcodes whose result is their operand's buffer, or that name buffers of others.
CONTROL = frozenset(("parameter", "get-tuple-element", "tuple", "while", "conditional", "call"))
TRANSPARENT = CONTROL | {"bitcast", "opt-barrier", "optimization-barrier"}
UPDATES = frozenset(("dynamic-update-slice", "scatter"))
# Instructions that a fused or renamed primitive leaves behind and that move nothing by themselves.
VIEWS = CONTROL | {"fusion", "bitcast", "transpose", "copy", "reshape"}
HOST_TRANSFERS = ("infeed", "outfeed", "send", "recv")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")


class ArrayType(NamedTuple):
    """Element type as XLA writes it, and sizes."""

    dtype: str
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    results: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    scope: str  # JAX's name stack, then the primitive
    arguments: str
    attributes: str
    is_root: bool

    @property
    def primitive(self) -> str:
        """The JAX primitive it came from; XLA may have replaced the opcode."""
        return self.scope.rsplit("/", 1)[-1].split("[")[0].replace("_", "-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramText:
    """A parsed program."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    aliases: dict[int, int]  # output number -> parameter number that lends its buffer

    def instructions(self) -> Iterator[tuple[dict[str, Instruction], Instruction]]:
        """Every instruction with its computation, bodies of fusions included."""
        for computation in self.computations.values():
            for instruction in computation.values():
                yield computation, instruction

    def aliased_types(self) -> dict[int, ArrayType]:
        """Output number -> type of the parameter whose buffer it takes."""
        parameters = (i for i in self.computations[self.entry].values() if i.opcode == "parameter")
        types = {int(i.arguments): i.results[0] for i in parameters}
        return {output: types[parameter] for output, parameter in self.aliases.items()}

    def fusion_bodies(self) -> set[str]:
        """Computations whose inner results are never stored."""
        return {name for _, i in self.instructions() if i.opcode == "fusion" for name in i.called}


def parse(text: str) -> ProgramText:
    """Parse the text of one module. Raises `ValueError` when there is no computation in it."""
    text = re.sub(r"/\*.*?\*/", "", text)
    head, computations, current, entry = text.split("\n", 1)[0], {}, None, ""
    for line in text.splitlines()[1:]:
        header = HEADER.match(line)
        if header and " = " not in line.split("(", 1)[0]:
            current = computations.setdefault(header.group(1), {})
            entry = header.group(1) if line.startswith("ENTRY") else entry
        elif current is not None and " = " in line:
            instruction = _instruction(line.strip())
            current[instruction.name] = instruction
    if not computations:
        raise ValueError("no computation found: pass the output of `compiled.as_text()`")
    alias = head.split("input_output_alias={", 1)
    pairs = ALIAS.findall(alias[1].split("entry_computation_layout", 1)[0]) if len(alias) > 1 else []
    aliases = {int(output): int(parameter) for output, parameter in pairs}
    return ProgramText(computations=computations, entry=entry, aliases=aliases)


def _instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    type_end = _closing(right) if right.startswith("(") else right.index(" ")
    rest = right[type_end:].lstrip()
    opcode, arguments = rest.split("(", 1)
    end = _closing("(" + arguments) - 1
    inside, attributes = arguments[: end - 1], arguments[end:]
    lists = [name for group in CALLED_LISTS.findall(attributes) for name in re.findall(r"[\w.\-]+", group)]
    scope = re.search(r'op_name="([^"]*)"', attributes)
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=opcode,
        results=_arrays(right[:type_end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        called=(*CALLED.findall(attributes), *lists),
        scope=scope.group(1) if scope else "",
        arguments=inside,
        attributes=attributes,
        is_root=left.startswith("ROOT "),
    )


def _closing(text: str) -> int:
    """Index after the parenthesis that closes the one at the start."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def _arrays(text: str) -> tuple[ArrayType, ...]:
    return tuple(ArrayType(d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in ARRAY.findall(text))


# --- pools ------------------------------------------------------------------------------------------------------------
def pool_copies(program: ProgramText, pools: Iterable[ArrayType]) -> list[Instruction]:
    """Instructions that make an array of a pool's type other than by updating the pool they were given.

    An update that could not share its operand's buffer shows as a copy in front of it, or as temporary memory.
    """
    wanted, inner = set(pools), program.fusion_bodies()
    found = []
    for name, computation in program.computations.items():
        for instruction in () if name in inner else computation.values():
            makes_pool = wanted & set(instruction.results)
            if makes_pool and not _is_in_place(program, computation, instruction, wanted):
                found.append(instruction)
    return found


def _is_in_place(program: ProgramText, computation, instruction: Instruction, pools: set[ArrayType]) -> bool:
    if instruction.opcode in TRANSPARENT | UPDATES:
        return True
    if instruction.opcode == "custom-call":  # a kernel: its declared aliasing
        return "output_to_operand_aliasing" in instruction.attributes
    if instruction.opcode != "fusion":
        return False
    body = program.computations[instruction.called[0]]
    root = next(i for i in body.values() if i.is_root)
    parts = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return all(_updates_parameter(body, part) for part in parts if pools & set(part.results))


def _updates_parameter(body: dict[str, Instruction], part: Instruction) -> bool:
    """Whether it is a chain of updates that starts at a parameter of the fusion."""
    num_updates = 0
    while part.opcode in UPDATES or part.opcode == "bitcast":
        num_updates += part.opcode in UPDATES
        part = body[part.operands[0]]
    return part.opcode == "parameter" and num_updates > 0


# --- rows and tokens --------------------------------------------------------------------------------------------------
def row_movements(
    program: ProgramText, scope: str, token_sizes: Iterable[int], pools: Iterable[ArrayType]
) -> list[Instruction]:
    """Gathers, scatters, sorts and concatenations of floating-point rows in scopes matching the pattern `scope`.

    A size in `token_sizes` marks an axis of tokens or rows. Exempt are reads and writes of pools, integers (tables,
    positions), and concatenations along other axes.
    """
    sizes, exempt, pattern = set(token_sizes), set(pools), re.compile(scope)
    found = []
    for computation, instruction in program.instructions():
        if instruction.opcode in VIEWS or not pattern.search(instruction.scope):
            continue
        operands = [r for name in instruction.operands for r in computation[name].results]
        arrays = [a for a in (*instruction.results, *operands) if _is_float(a) and sizes & set(a.dims)]
        kinds = {instruction.opcode, instruction.primitive}
        moves = kinds & {"gather", "scatter", "scatter-add", "sort"} and not exempt & {*instruction.results, *operands}
        is_join = instruction.opcode == "concatenate" or (instruction.opcode, instruction.primitive) == (
            "pad",
            "concatenate",
        )
        joins = is_join and _joins_tokens(instruction, operands, sizes)
        if arrays and (moves or joins):
            found.append(instruction)
    return found


def _is_float(array: ArrayType) -> bool:
    return array.dtype.startswith(("f", "bf"))


def _joins_tokens(instruction: Instruction, operands: list[ArrayType], sizes: set[int]) -> bool:
    """Whether an axis of tokens changes its length; XLA also writes a concatenation as padding and selects."""
    result = instruction.results[0].dims
    return any(
        new != old and ({new, old} & sizes)
        for operand in operands
        if len(operand.dims) == len(result)
        for new, old in zip(result, operand.dims, strict=True)
    )


# --- collectives ------------------------------------------------------------------------------------------------------
def collectives(program: ProgramText) -> list[Instruction]:
    """Every collective in the text; an asynchronous pair counts once, one inside a loop stands for all its turns."""
    names = {*COLLECTIVES, *(f"{name}-start" for name in COLLECTIVES)}
    return [instruction for _, instruction in program.instructions() if instruction.opcode in names]


# --- sizes, and the host ----------------------------------------------------------------------------------------------
def large_results(program: ProgramText, num_elements: int, exempt: Iterable[ArrayType]) -> list[Instruction]:
    """Instructions that make an array of at least so many elements, of any type but those exempt; pools, say.

    Bodies of fusions are looked at too: what they make is not stored, but it is computed.
    """
    kept = set(exempt)

    def is_large(array: ArrayType) -> bool:
        return math.prod(array.dims) >= num_elements and array not in kept

    return [i for _, i in program.instructions() if i.opcode not in TRANSPARENT and any(map(is_large, i.results))]


def host_transfers(program: ProgramText) -> list[Instruction]:
    """Instructions for which a step would wait for the host: transfers, and calls of its functions."""
    names = {f"{name}{suffix}" for name in HOST_TRANSFERS for suffix in ("", "-done")}

    def calls_back(instruction: Instruction) -> bool:
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        return target is not None and "callback" in target.group(1)

    return [i for _, i in program.instructions() if i.opcode in names or calls_back(i)]
