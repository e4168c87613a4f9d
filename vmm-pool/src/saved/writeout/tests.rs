use super::*;
use crate::deferred::Physical;
use crate::driver::sim::{SimDriver, SimNode, SimOptions};
use crate::driver::{AllocationProp, DeviceOrdinal, RawHandle};
use crate::error::PoolError;
use crate::ledger::{NewRow, Origin};
use crate::store::Store;
use crate::{Class, HoldingSource};

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
    WriteOut::laid_out(holdings, ContentsFile::full()).0
}

/// Of which allocation each piece is, where in it, and where in the file.
fn pieces(out: WriteOut) -> Vec<(usize, Range<u64>, u64)> {
    out.left.into_iter().map(|Stretch { source, part, at }| (source, part, at)).collect()
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

#[test]
fn a_full_disk_is_an_error_that_names_the_place() {
    let node = SimNode::private(&[64 << 20]).unwrap();
    let driver = std::sync::Arc::new(SimDriver::new(node, SimOptions::default()));
    let (pool, _keeper) = Pool::new(driver, 1, Vec::new);
    pool.host_memory().arena().disk.use_full();
    let full = holding(4096, &[Range { start: 0, end: 4096 }]);
    let (prop, class) = (AllocationProp::pinned_on(DeviceOrdinal(0)), Class::default());
    let (size_bytes, origin) = (full.size_bytes, Origin::Own);
    let new = NewRow { id: ID, size_bytes, prop, origin, class };
    let row = pool.ledger().rows.insert(new, Physical::new(RawHandle(1), size_bytes, None));
    // What is read there is zeros.
    pool.ledger().saved(row, Saved::whole(Store::File, 0, size_bytes));
    let mut out = laid_out(&[full]);
    let error = out.write_on(&pool, Instant::now()).unwrap_err();
    assert!(matches!(&error, PoolError::FileRefused { size_bytes: 4096, .. }), "{error}");
    assert!(error.to_string().contains("No space left on device"), "{error}");
}
