"""Check the coded data of many baseline JPEGs on a GPU: whether each is valid from the first bit to the last.

A scan is one chain of Huffman codes. A reader that begins somewhere in it, in a wrong state, soon falls into step with
the right one. So each lane of a program reads a piece of its own, beginning in a state it assumes; then again from the
state in which the piece before was left, until none of these changes. The first piece begins in the right state, so in
the end all do, whatever the data are.

A state is a position in bits, the block of the unit (MCU) and the coefficient of the block that come next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

# Lanes of the program that checks a file, and the least bytes that a lane reads
_LANES, _PIECE = 128, 32
# Bytes, and entries of a table, that a program handles at a time
_CHUNK, _ENTRIES = tl.constexpr(1024), tl.constexpr(256)
# Codes that are read before asking whether any lane has more
_STEPS = tl.constexpr(4)
# A table has an entry for each value of 10 bits, and for each value of 16 bits that begins with a longer code, of which
# baseline has at most 162. The entry after them stays empty.
_SHORT, _LONG = tl.constexpr(1 << 10), tl.constexpr(162 << 5)
_FIRST_LONG, _SIZE = tl.constexpr(_SHORT + _LONG + 1), tl.constexpr(_SHORT + _LONG + 2)
_FRAME, _HUFFMAN, _SCAN, _RESTARTS = tl.constexpr(0xC0), tl.constexpr(0xC4), tl.constexpr(0xDA), tl.constexpr(0xDD)


def check_scans(
    files: Sequence[NDArray[np.uint8]], device: torch.device, lanes: int = _LANES, piece: int = _PIECE
) -> NDArray[np.bool_]:
    """Return whether the coded data of each file are valid and complete.

    Files end with their end marker and have headers that passed `veca.images.jpeg.gpu_decodable`. Every code must be in
    its table, every coefficient within its block, and every restart interval must have its blocks and then less than 8
    bits of padding with ones.
    """
    count = len(files)
    offsets = np.zeros(count + 1, np.int64)
    offsets[0] = offsets.nbytes
    offsets[1:] = [len(file) for file in files]
    np.cumsum(offsets, out=offsets)
    size = int(offsets[-1])
    # One copy: offsets, then files
    sent = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.concatenate([offsets.view(np.uint8), *files], out=sent.numpy())
    received = sent.to(device, non_blocking=True)
    words = torch.empty(size // 4 + 4 * count, dtype=torch.int32, device=device)
    starts = torch.empty(size // 2 + 2 * count, dtype=torch.int32, device=device)
    tables = torch.zeros(count, 4, _SIZE.value, dtype=torch.int16, device=device)
    valid = torch.empty(count, dtype=torch.bool, device=device)
    sizes = {"LANES": lanes, "PIECE": piece, "num_warps": max(lanes // 32, 1)}
    places = received[: offsets.nbytes].view(torch.int64)
    _check[(count,)](received, places, words, starts, tables, valid, **sizes)
    return valid.cpu().numpy()


@triton.jit
def _byte(file, place, length):
    return tl.load(file + place, place < length, 0).to(tl.int32)


@triton.jit
def _pair(file, place, length):
    return _byte(file, place, length) << 8 | _byte(file, place + 1, length)


@triton.jit
def _read_header(file, length):
    """Return width, height, luma's sampling factors, restart interval; where the Huffman tables and the scan are."""
    dc0, dc1, ac0, ac1, width, height, factors, interval = 0, 0, 0, 0, 0, 0, 0, 0
    marker, start, stop = 0, 0, 2
    while (marker != _SCAN) & (stop < length):
        marker, start = _byte(file, stop + 1, length), stop + 4
        stop += 2 + _pair(file, stop + 2, length)
        if marker == _HUFFMAN:
            table = start
            while table < stop:
                number = _byte(file, table, length)
                dc0, dc1 = tl.where(number == 0, table, dc0), tl.where(number == 1, table, dc1)
                ac0, ac1 = tl.where(number == 16, table, ac0), tl.where(number == 17, table, ac1)
                table += 17 + tl.sum(_byte(file, table + 1 + tl.arange(0, 16), length), 0)
        if marker == _FRAME:
            height, width = _pair(file, start + 1, length), _pair(file, start + 3, length)
            factors = _byte(file, start + 7, length)
        if marker == _RESTARTS:
            interval = _pair(file, start, length)
    return width, height, factors, interval, dc0, dc1, ac0, ac1, start, stop


@triton.jit
def _make_table(file, place, length, table, ac):
    """Store the entries of a Huffman table.

    An entry has the bits that a code takes with those that follow it (5 bits), and the coefficients that it stands for
    (7 bits), 0 for the end of the block; the next bit is set where another code must follow in the block. 0 is no code.
    After the entries is the first value of 10 bits that begins a longer code.
    """
    bits = tl.arange(0, 16) + 1
    counts = tl.where(place > 0, _byte(file, place + bits, length), 0)
    width = counts << (16 - bits)
    ends, symbols = tl.cumsum(width, 0), tl.cumsum(counts, 0) - counts
    long, total = tl.sum(tl.where(bits <= 10, width, 0), 0), tl.sum(width, 0)
    first, end, shift = (ends - width)[None, :], ends[None, :], 16 - bits[None, :]
    for begin in range(0, tl.minimum(_SHORT + total - long, _SHORT + _LONG), _ENTRIES):
        entry = begin + tl.arange(0, _ENTRIES)
        value = tl.where(entry < _SHORT, entry << 6, entry - _SHORT + long)
        mine = (value[:, None] >= first) & (value[:, None] < end)
        taken = tl.sum(tl.where(mine, bits[None, :], 0), 1)
        index = tl.sum(tl.where(mine, symbols[None, :] + ((value[:, None] - first) >> shift), 0), 1)
        symbol = _byte(file, place + 17 + index, length)
        extra, run = tl.where(ac, symbol & 15, symbol), tl.where(ac, symbol >> 4, 0)
        ends_block, zeros = ac & (symbol == 0), ac & (symbol == 0xF0)
        known = tl.where(ac & (extra == 0), ends_block | zeros, extra <= tl.where(ac, 10, 11))
        advance = tl.where(ends_block, 0, tl.where(zeros, 16 | 128, run + 1))
        made = tl.where(known & (taken > 0), taken + extra | advance << 5, 0)
        kept = tl.where(entry < _SHORT, value < long, value < total) & (entry < _SHORT + _LONG)
        tl.store(table + entry, made.to(tl.int16), kept)
    tl.store(table + _FIRST_LONG, (long >> 6).to(tl.int16))


@triton.jit
def _unstuff(file, start, length, data, starts):
    """Copy the scan without stuffed bytes and with ones in place of markers, of which the number is returned.

    In `data` each four bytes are in reverse, so that they are a word. `starts` gets where data begin after each marker.
    """
    copied, markers = 0, 0
    tl.store(starts, 0)
    for begin in range(start, length, _CHUNK):
        place = begin + tl.arange(0, _CHUNK)
        value, before = _byte(file, place, length), _byte(file, place - 1, length)
        marker = (place < length) & (before == 255) & (value != 0)
        kept = (place < length) & ((before != 255) | (value != 0))
        count = kept.to(tl.int32) + (marker.to(tl.int32) << 16)
        counted = tl.cumsum(count, 0)
        target, number = copied + (counted & 0xFFFF) - 1, markers + (counted >> 16)
        tl.store(data + (target ^ 3), tl.where(marker, 255, value).to(tl.uint8), kept)
        tl.store(starts + number, target + 1, marker & (number <= length // 2))
        added = tl.sum(count, 0)
        copied, markers = copied + (added & 0xFFFF), markers + (added >> 16)
    return markers


@triton.jit
def _read_scan_header(file, start, length, factors):
    """Return how many blocks a unit has, a bit for the DC and the AC table of each, and after how many these repeat."""
    luma, blue, red = _byte(file, start + 2, length), _byte(file, start + 4, length), _byte(file, start + 6, length)
    blocks = (factors >> 4) * (factors & 15)
    dc_tables, ac_tables = (luma >> 4 & 1) * ((1 << blocks) - 1), (luma & 1) * ((1 << blocks) - 1)
    if _byte(file, start, length) > 1:
        dc_tables |= (blue >> 4 & 1) << blocks | (red >> 4 & 1) << (blocks + 1)
        ac_tables |= (blue & 1) << blocks | (red & 1) << (blocks + 1)
        blocks += 2
    last = (1 << blocks) - 1
    same = ((dc_tables == 0) | (dc_tables == last)) & ((ac_tables == 0) | (ac_tables == last))
    return blocks, dc_tables, ac_tables, tl.where(same, 1, blocks)


@triton.jit
def _walk(going, position, block, coefficient, end, words, tables, dc_tables, ac_tables, period):
    """Read codes up to `end` in the lanes that are `going`; return the state each is left in, and the blocks it ended.

    A lane stops before its end where there is no code, or one that leads beyond the block.
    """
    blocks = tl.zeros_like(position)
    place = position >> 5
    word, following = tl.load(words + place), tl.load(words + place + 1)
    while tl.max(going.to(tl.int32), 0) > 0:
        for _ in tl.static_range(_STEPS):
            shift = (position & 31).to(tl.uint32)
            value = ((word << shift | (following >> (31 - shift)) >> 1) >> 16).to(tl.int32)
            kind = tl.where(coefficient > 0, 2 + (ac_tables >> block & 1), dc_tables >> block & 1)
            table = tables + kind * _SIZE
            long = tl.load(table + _FIRST_LONG).to(tl.int32)
            index = tl.where(value >> 6 < long, value >> 6, tl.minimum(value - (long << 6), _LONG) + _SHORT)
            entry = tl.load(table + index).to(tl.int32)
            advance = entry >> 5 & 127
            after = coefficient + advance
            good = going & (entry != 0) & (after + (entry >> 12) <= 64)
            ended = good & ((advance == 0) | (after == 64))
            position += tl.where(good, entry & 31, 0)
            coefficient = tl.where(ended, 0, tl.where(good, after, coefficient))
            block = tl.where(ended, tl.where(block + 1 == period, 0, block + 1), block)
            blocks += ended.to(tl.int32)
            going = good & (position < end)
            moved = position >> 5 != place
            place = position >> 5
            word = tl.where(moved, following, word)
            following = tl.load(words + place + 1, moved, following)
    return position, block, coefficient, blocks


@triton.jit
def _count_blocks(begin, end, linked, words, tables, dc_tables, ac_tables, period):
    """Read the pieces from `begin` to `end`, in bits; those that are `linked` follow the one before.

    Returns where each is left, or -1 inside a block, whether that is at its end, and how many blocks were ended.
    """
    lane = tl.arange(0, begin.shape[0])
    entry = begin.to(tl.int64) << 9
    changed = begin < end
    leave, left, blocks = entry, begin, tl.zeros_like(begin)
    while tl.max(changed.to(tl.int32), 0) > 0:
        position, state = (entry >> 9).to(tl.int32), (entry & 511).to(tl.int32)
        position, block, coefficient, count = _walk(
            changed & (position < end), position, state >> 6, state & 63, end,
            words, tables, dc_tables, ac_tables, period,
        )  # fmt: skip
        state = position.to(tl.int64) << 9 | (block << 6 | coefficient)
        leave = tl.where(changed, tl.where(position < end, -1, state), leave)
        left = tl.where(changed, tl.where(coefficient > 0, -1, position), left)
        blocks = tl.where(changed, count, blocks)
        before = tl.gather(leave, tl.maximum(lane - 1, 0), 0)
        changed = linked & (before >= 0) & (before != entry)
        entry = tl.where(changed, before, entry)
    return left, leave >= 0, blocks


@triton.jit
def _check(files, offsets, words, starts, tables, valid, LANES: tl.constexpr, PIECE: tl.constexpr):
    """Check a file: read its header, prepare tables and data, and read its restart intervals, many at a time."""
    i = tl.program_id(0)
    offset = tl.load(offsets + i)
    length, file = (tl.load(offsets + i + 1) - offset).to(tl.int32), files + offset
    words, starts, tables = words + (offset // 4 + 4 * i), starts + (offset // 2 + 2 * i), tables + i * 4 * _SIZE
    data, words = words.to(tl.pointer_type(tl.uint8)), words.to(tl.pointer_type(tl.uint32))
    width, height, factors, interval, dc0, dc1, ac0, ac1, scan, start = _read_header(file, length)
    blocks, dc_tables, ac_tables, period = _read_scan_header(file, scan, length, factors)
    for kind in range(4):
        place = tl.where(kind < 2, tl.where(kind == 0, dc0, dc1), tl.where(kind == 2, ac0, ac1))
        _make_table(file, place, length, tables + kind * _SIZE, kind >= 2)
    markers = _unstuff(file, start, length, data, starts)
    tl.debug_barrier()  # what one lane stored is now seen by all

    units = tl.cdiv(width, 8 * (factors >> 4)) * tl.cdiv(height, 8 * (factors & 15))
    interval = tl.where(interval > 0, interval, units)
    intervals = tl.cdiv(units, interval)
    pieces = tl.maximum(LANES // intervals, 1)
    at_once = LANES // pieces
    lane = tl.arange(0, LANES)
    piece = lane % pieces
    wrong = (markers != intervals).to(tl.int32)
    for done in range(0, tl.where(wrong > 0, 0, intervals), at_once):
        number = done + lane // pieces
        used = (lane < at_once * pieces) & (number < intervals)
        first, stop = tl.load(starts + number, used, 0), tl.load(starts + number + 1, used, 2) - 2
        size = tl.maximum(tl.cdiv(stop - first, pieces), PIECE)
        last = tl.maximum(tl.cdiv(stop - first, size) - 1, 0)
        begin, end = tl.minimum(first + piece * size, stop), tl.minimum(first + (piece + 1) * size, stop)
        linked = used & (piece > 0) & (piece <= last)
        left, through, count = _count_blocks(
            8 * begin, 8 * end, linked, words, tables, dc_tables, ac_tables, period
        )  # fmt: skip
        total = tl.cumsum(count, 0)
        total -= tl.gather(total - count, lane - piece, 0)
        expected = blocks * tl.minimum(interval, units - number * interval)
        padding = 8 * stop - left
        ones = (1 << (padding & 7)) - 1
        tail = tl.load(data + (tl.maximum(stop - 1, 0) ^ 3)).to(tl.int32)
        complete = (left >= 0) & (padding >= 0) & (padding < 8) & (tail & ones == ones) & (total == expected)
        failed = tl.where(piece < last, ~through, (piece == last) & ~complete)
        wrong += tl.sum((used & failed).to(tl.int32), 0)
    tl.store(valid + i, wrong == 0)
