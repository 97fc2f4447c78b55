use super::*;
use crate::error::Kind;

/// No limit of the footer's bytes.
const ROOM: usize = usize::MAX;

/// Appends the footer of `entries` to `into`, without padding. Sorts `entries`.
fn encode_footer(entries: &mut [FooterEntry], serial: u64, max_bytes: usize, into: &mut Vec<u8>) -> FooterTrailer {
    let (start, footer) = (into.len(), SegmentFooter::of(entries, max_bytes));
    into.resize(start + footer.bytes(), 1);
    let trailer = footer.encode(serial, &mut into[start..]);
    entries.sort_unstable_by_key(FooterEntry::key);
    trailer
}

fn entry(record: u32, write_seq: u64, modified_epoch: u32, last_step: LastStep) -> FooterEntry {
    FooterEntry { id: 25 - i64::from(record), write_seq, last_step, modified_epoch, record }
}

#[test]
fn entries_are_sorted_by_hash_and_then_by_the_order_of_writing() {
    for (len, ids) in [(0, 1), (5, 9), (63, 9), (64, 1), (1000, 1), (1000, 30), (70_000, 1 << 40)] {
        let ids = |at: u64| (hash_id(at as Id) % ids) as Id;
        let seqs = |at: u64| hash_id(!at as Id);
        let entries: Vec<FooterEntry> = (0..len)
            .map(|at| FooterEntry { id: ids(at), ..entry(at as u32, seqs(at), 0, LastStep::UNKNOWN) })
            .collect();
        let mut expected = entries.clone();
        expected.sort_by_key(FooterEntry::key);
        let order = sorted_order(&entries);
        assert_eq!(order.is_some(), len > 32, "{len} entries");
        let Some(order) = order else { continue };
        let ordered: Vec<FooterEntry> = order.iter().map(|ordered| entries[entry_number(*ordered)]).collect();
        assert!(ordered == expected, "{len} entries");
    }
}

#[test]
fn entries_take_the_bytes_that_their_segment_needs_and_come_back() {
    let far = |step: u64| (0..300_u32).map(move |i| (u64::from(i) * step, i * (step >> 40) as u32));
    let known = |i: u32, by: u64| LastStep::of(u64::from(i % 3) * by);
    for (step, by, bytes) in [
        (0, None, 10),
        (0, Some(0), 10),
        (0, Some(1), 11),
        (0, Some(200), 12),
        (0, Some(1 << 60), 18),
        (1, None, 12),
        (1, Some(1 << 60), 20),
        (1 << 12, Some(1 << 20), 16),
        (1 << 24, None, 15),
        (1 << 55, None, 8 + 8 + 3 + 2),
        (1 << 55, Some(100), 8 + 8 + 3 + 1 + 2),
    ] {
        let steps = |i: u32| by.map_or(LastStep::UNKNOWN, |by| known(i, by));
        let mut entries: Vec<FooterEntry> =
            (0..).zip(far(step)).map(|(i, (seq, epoch))| entry(i, 5 + seq, epoch, steps(i))).collect();
        let mut footer = Vec::new();
        let format = encode_footer(&mut entries, 1, ROOM, &mut footer).entry_format();
        assert_eq!(format.bytes(), bytes, "{step} {by:?}");
        assert!(footer.chunks(bytes).zip(&entries).all(|(bytes, entry)| format.decode(bytes) == *entry));
    }
    assert_eq!(encode_footer(&mut [], 1, ROOM, &mut Vec::new()).entry_format().bytes(), 8);
}

#[test]
fn steps_are_omitted_if_unknown_or_too_large() {
    let made = |steps: [LastStep; 2], epoch: u32, seq: u64, most_bytes: usize| {
        let mut entries = [entry(0, 1, 0, steps[0]), entry(1, 1 + seq, epoch, steps[1])];
        let mut footer = Vec::new();
        let trailer = encode_footer(&mut entries, 1, most_bytes, &mut footer);
        let tail = &footer[footer.len() - TRAILER_BYTES..];
        assert_eq!(decode_trailer(tail, Path::new("x"), 0, 1).unwrap(), trailer);
        (trailer.steps.map(|steps| (steps.lowest, steps.highest)), footer.len())
    };
    let (low, high) = (LastStep::of(7), LastStep::of(9));
    assert_eq!(made([low, high], 0, 1, ROOM), (Some((7, 9)), 2 * 11 + 72));
    assert_eq!(made([low, high], 0, 1, 2 * 11 + 72), (Some((7, 9)), 2 * 11 + 72));
    assert_eq!(made([low, high], 0, 1, 2 * 11 + 71), (None, 2 * 10 + 72));
    assert_eq!(made([low, LastStep::UNKNOWN], 0, 1, ROOM), (None, 2 * 10 + 72));
    assert_eq!(made([low, LastStep::of(u64::MAX)], 0, 1, ROOM), (None, 2 * 10 + 72), "it counts as unknown");
    let wide = LastStep::of(u64::MAX - 1);
    assert_eq!(made([low, wide], 1 << 24, 1 << 32, ROOM), (None, 2 * 18 + 72), "23 bytes an entry do not hold it");
    assert_eq!(made([low, wide], 200, 1 << 32, ROOM).0, Some((7, u64::MAX - 1)));
}

#[test]
fn footer_is_sorted_and_detects_trailer_bit_flips() {
    for known in [true, false] {
        let step = |i: u32| if known { LastStep::of(1000 - u64::from(i)) } else { LastStep::UNKNOWN };
        let mut entries: Vec<FooterEntry> = (0..50).map(|i| entry(i, 100 + u64::from(i), i % 7, step(i))).collect();
        let mut bytes = Vec::new();
        let trailer = encode_footer(&mut entries, 9, ROOM, &mut bytes);
        assert!(entries.is_sorted_by_key(|entry| hash_id(entry.id)));
        let format = trailer.entry_format();
        assert_eq!(format.bytes(), 8 + 1 + 1 + usize::from(known) + 1);
        let body = &bytes[..50 * format.bytes()];
        assert!(body.chunks(format.bytes()).map(|bytes| format.decode(bytes)).eq(entries.iter().copied()));
        let tail = &bytes[bytes.len() - TRAILER_BYTES..];
        assert_eq!(decode_trailer(tail, Path::new("x"), 0, 9).unwrap(), trailer);
        assert_eq!(
            (trailer.records, trailer.highest_epoch, trailer.lowest_seq, trailer.highest_seq),
            (50, 6, 100, 149)
        );
        assert_eq!(trailer.steps.map(|steps| (steps.lowest, steps.highest)), known.then_some((951, 1000)));
        for bit in 0..TRAILER_BYTES * 8 {
            let mut flipped = tail.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let error = decode_trailer(&flipped, Path::new("x"), 0, 9).unwrap_err();
            assert_eq!(error.kind(), Kind::Corruption, "{bit}");
        }
        assert!(decode_trailer(tail, Path::new("x"), 0, 8).is_err());
    }
}

/// A trailer with other bytes in place of absent steps is rejected, also with the right checksum.
#[test]
fn trailer_with_bytes_in_place_of_absent_steps_is_rejected() {
    let trailer = |step: LastStep| {
        let mut bytes = Vec::new();
        encode_footer(&mut [entry(0, 1, 0, step)], 9, ROOM, &mut bytes);
        bytes.split_off(bytes.len() - TRAILER_BYTES)
    };
    let read = |tail: &[u8], at: usize, value: u8| {
        let mut tail = tail.to_vec();
        tail[at] = value;
        let crc = crc32c::crc32c(&tail[..CRC_AT]);
        tail[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        decode_trailer(&tail, Path::new("x"), 0, 9)
    };
    for tail in [trailer(LastStep::UNKNOWN), trailer(LastStep::of(0))] {
        assert!(read(&tail, 56, tail[56]).is_ok());
        let others = (9..=254).map(|bytes| (56, bytes)).chain((57..64).map(|at| (at, 1)));
        for (at, value) in others {
            let error = read(&tail, at, value).expect_err("refused");
            assert_eq!(error.kind(), Kind::Corruption, "{value} at {at}: {error}");
        }
    }
    for at in 40..56 {
        let error = read(&trailer(LastStep::UNKNOWN), at, 1).expect_err("refused");
        assert!(error.kind() == Kind::Corruption && error.to_string().contains("0, 0, 255"), "{at}: {error}");
    }
}
