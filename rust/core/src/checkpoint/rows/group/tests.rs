use super::*;
use crate::io::AlignedBuf;
use crate::rows::RowHeader;
use crate::types::hash_id;

#[test]
fn bytes_of_any_number_and_alignment_are_copied() {
    let from: Vec<u8> = (0..1000_u16).map(|n| n as u8).collect();
    for (start, end) in [(0, 0), (0, 1000), (7, 9), (3, 67), (64, 192), (61, 200)] {
        let mut to = AlignedBuf::zeroed(1000);
        copy_past_caches(&mut to[start..end], &from[1000 - (end - start)..]);
        assert!(to[start..end] == from[1000 - (end - start)..]);
        assert!(to[..start].iter().chain(&to[end..]).all(|&byte| byte == 0));
    }
}

#[test]
fn rows_are_scattered_with_checksums_that_join() {
    for dim in [16, 32, 64, 48, 256] {
        let (count, parts) = (5000_usize, 2);
        let values: Vec<f32> = (0..count * dim * parts).map(|n| hash_id(n as i64) as i32 as f32).collect();
        let headers = vec![RowHeader::default(); count];
        let rows = RowList::block(&headers, &values, dim * parts);
        let file_rows: Vec<u32> = (0..count).map(|n| (n * 1237 % count) as u32).collect();
        let mut columns: Vec<AlignedBuf> = (0..parts).map(|_| AlignedBuf::zeroed(count * dim * 4)).collect();
        let mut slices: Vec<&mut [u8]> = columns.iter_mut().map(|column| &mut column[..]).collect();
        let mut sums = vec![vec![0; count]; parts];
        let done = scatter(rows, &file_rows, &mut slices, dim, &mut sums);
        assert_eq!(done, cfg!(target_arch = "x86_64"));
        #[cfg(target_arch = "x86_64")]
        {
            let mut by_words = vec![vec![0; count]; parts];
            assert!(x86::scatter(rows, &file_rows, &mut slices, dim, &mut by_words, false));
            assert!(by_words == sums, "checksums of {dim} floats are the same by words");
        }
        assert!(!scatter(rows, &file_rows, &mut [&mut [][..]], dim + 1, &mut []), "no whole lines");
        if !done {
            return;
        }
        for (number, row) in rows.iter().enumerate() {
            let file_row = number * 1237 % count;
            for (part, from) in row.vector.chunks(dim).enumerate() {
                let found = &columns[part][file_row * dim * 4..(file_row + 1) * dim * 4];
                assert_eq!(found, bytemuck::cast_slice::<f32, u8>(from), "row {number}, part {part}");
                assert_eq!(sums[part][file_row], crc32c::crc32c(found));
            }
        }
        let shift = ChecksumShift::for_bytes(dim * 4);
        for (from, to) in [(0, 0), (3, 4), (0, 128), (17, count)] {
            let expected = crc32c::crc32c(&columns[0][from * dim * 4..to * dim * 4]);
            assert_eq!(shift.join(&sums[0][from..to]), expected, "rows {from}..{to} of {dim}");
        }
    }
}
