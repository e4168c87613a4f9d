use vmm_pool::{Class, HoldingSource};

use super::*;

const ID: AllocationId = AllocationId([7; 16]);

fn holding(size_bytes: u64, parts: &[Range<u64>]) -> Holding {
    Holding {
        id: ID,
        class: Class::default(),
        device: None,
        size_bytes,
        ranges: Vec::new(),
        source: HoldingSource::Own { importers: Vec::new() },
        is_resident: false,
        saved_parts: parts.to_vec(),
    }
}

fn laid_out(holdings: &[Holding]) -> WriteOut {
    WriteOut::laid_out(holdings, DiskFile::full()).0
}

/// Returns the allocation of each piece, its offset there, and its offset in the file.
fn pieces(out: WriteOut) -> Vec<(usize, Range<u64>, u64)> {
    out.left.into()
}

#[test]
fn allocations_begin_at_whole_pages_and_what_is_not_saved_has_no_place() {
    let parts = [0..5000, 9000..10_000];
    let whole = Range { start: 0, end: 4096 };
    let holdings =
        [holding(10_000, &parts), holding(8192, &[]), holding(4096, std::slice::from_ref(&whole))];
    let out = laid_out(&holdings);
    let offsets = [0, 1, 2].map(|index| out.written(index).map(|place| place.offset_bytes));
    assert_eq!(offsets, [Some(0), None, Some(12_288)]);
    assert_eq!(out.total_bytes(), 10_096);
    assert_eq!(pieces(out), [(0, 0..5000, 0), (0, 9000..10_000, 9000), (2, whole, 12_288)]);
}

#[test]
fn large_parts_are_written_piece_by_piece() {
    let piece = PIECE_BYTES;
    let large = Range { start: 100, end: 2 * piece + 300 };
    let pieces = pieces(laid_out(&[holding(3 * piece, &[large])]));
    let ends = [100, 100 + piece, 100 + 2 * piece, 300 + 2 * piece];
    let expected: Vec<_> = ends.windows(2).map(|pair| (0, pair[0]..pair[1], pair[0])).collect();
    assert_eq!(pieces, expected);
}
