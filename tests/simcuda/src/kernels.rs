//! The kernels that the simulation knows, by name.
//!
//! | name | arguments | effect |
//! | --- | --- | --- |
//! | `fill_u32` | `dst, value: u32, count: u64` | `dst[i] = value` |
//! | `add_u32` | `dst, a, b, count: u64` | `dst[i] = a[i] + b[i]`, wrapping |
//! | `affine_u32` | `data, mul: u32, add: u32, count: u64` | `data[i] = data[i] * mul + add`, wrapping |
//! | `sum_u32` | `out, in, count: u64` | `*(u64 *)out` is the sum of `in[i]` |
//! | `count_up_u32` | `dst, first: u32, step: u32, count: u64` | `dst[i] = first + i * step`, wrapping |
//! | `differs_u32` | `out, data, first: u32, step: u32, count: u64` | adds to `*(u64 *)out` how many `data[i]` are not `first + i * step` |
//! | `store_u32` | `dst, value: u32` | `*dst = value`, atomically |
//! | `spin_until_nonzero` | `flag` | waits until `*flag` is not 0, as a collective waits for its peer |
//! | `wait_at_least_u32` | `flag, value: u32` | waits until `*flag` is `value` or more, as an all-reduce written by hand does |
//! | `fill_struct_u32` | [`Filled`], by value | `dst[i] = value` |
//! | `add_each_u32` | [`Each`], by value, `add: u32` | `places[k][i] += add` for the first `lists`, wrapping |
//! | `fill_behind_u32` | `list, value: u32, count: u64` | `(*list)[i] = value`: where it writes lies in device memory |
//! | `sublet_fingerprint` | `slots`, `keys` | the fingerprint of the piece that each slot asks for, a slot a block |
//!
//! For the others the grid does not matter. A kernel that touches an address it may not fails with `ILLEGAL_ADDRESS`.

#![expect(
    unsafe_code,
    reason = "kernels load and store at device addresses whose access was just checked"
)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use vmm_pool::driver::sim::{Core, Touch, Work};
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, DriverCode, Keys, VaRange};

use crate::abi::{Coded, In};

const FIRST: u64 = 0x6400_0000;
const STEP: u64 = 0x10;
/// Between the functions of one device and those of the next.
const DEVICE_STEP: u64 = 0x1000;
const POLL: Duration = Duration::from_micros(200);
const U32_BYTES: u64 = 4;

/// A kernel known by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    Fill,
    Add,
    Affine,
    Sum,
    CountUp,
    Differs,
    Store,
    Spin,
    WaitAtLeast,
    FillStruct,
    AddEach,
    FillBehind,
    Fingerprint,
}

/// An address in the middle of a structure.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Filled {
    before: u32,
    value: u32,
    count: u64,
    dst: u64,
    after: u64,
}

/// As many addresses as a kernel over lists of tensors is given.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Each {
    places: [u64; EACH_MAX],
    count: u64,
    lists: u32,
    after: u32,
}

const EACH_MAX: usize = 8;

const ALL: &[(&str, Kernel)] = &[
    ("fill_u32", Kernel::Fill),
    ("add_u32", Kernel::Add),
    ("affine_u32", Kernel::Affine),
    ("sum_u32", Kernel::Sum),
    ("count_up_u32", Kernel::CountUp),
    ("differs_u32", Kernel::Differs),
    ("store_u32", Kernel::Store),
    ("spin_until_nonzero", Kernel::Spin),
    ("wait_at_least_u32", Kernel::WaitAtLeast),
    ("fill_struct_u32", Kernel::FillStruct),
    ("add_each_u32", Kernel::AddEach),
    ("fill_behind_u32", Kernel::FillBehind),
    ("sublet_fingerprint", Kernel::Fingerprint),
];

/// The function value of the kernel `name` in the module of `device`.
pub(crate) fn function_named(name: &str, device: DeviceOrdinal) -> Coded<u64> {
    ALL.iter()
        .position(|(known, _)| *known == name)
        .map(|index| first_of(device) + index as u64 * STEP)
        .ok_or(DriverCode::NOT_FOUND)
}

fn first_of(device: DeviceOrdinal) -> u64 {
    FIRST + u64::from(device.0.unsigned_abs()) * DEVICE_STEP
}

/// The kernel of a function, which must be of `device`'s module.
fn kernel_of(function: u64, device: DeviceOrdinal) -> Coded<Kernel> {
    function
        .checked_sub(first_of(device))
        .filter(|offset| offset.is_multiple_of(STEP))
        .and_then(|offset| ALL.get(usize::try_from(offset / STEP).ok()?))
        .map(|(_, kernel)| *kernel)
        .ok_or(DriverCode::INVALID_HANDLE)
}

/// The kernel of `function` as work, its arguments read now. `INVALID_HANDLE` for a function of another device's
/// module, as driver 580 has it: function and stream are of one context, and the current one does not matter.
pub(crate) fn launch(
    function: u64,
    device: DeviceOrdinal,
    grid: [u32; 3],
    params: In<In<u8>>,
) -> Coded<Work> {
    let kernel = kernel_of(function, device)?;
    let params = params.list(layout(kernel).len() as u64)?;
    let wide = |index: usize| params[index].cast::<u64>().get();
    let narrow = |index: usize| params[index].cast::<u32>().get();
    let reads = |start, count| Some((words(start, count).ok()?, Touch::Read));
    let writes = |start, count| Some((words(start, count).ok()?, Touch::Write));
    let (work, touched) = match kernel {
        Kernel::Fill => {
            let (dst, value, count) = (wide(0)?, narrow(1)?, wide(2)?);
            let work = Work::new(move |core| fill(core, device, dst, value, count));
            (work, vec![writes(dst, count)])
        }
        Kernel::Add => {
            let (dst, a, b, count) = (wide(0)?, wide(1)?, wide(2)?, wide(3)?);
            let work = Work::new(move |core| add(core, device, dst, [a, b], count));
            (work, vec![writes(dst, count), reads(a, count), reads(b, count)])
        }
        Kernel::Affine => {
            let (data, mul, add, count) = (wide(0)?, narrow(1)?, narrow(2)?, wide(3)?);
            let work = Work::new(move |core| affine(core, device, data, (mul, add), count));
            (work, vec![writes(data, count)])
        }
        Kernel::Sum => {
            let (out, data, count) = (wide(0)?, wide(1)?, wide(2)?);
            let work = Work::new(move |core| sum(core, device, out, data, count));
            (work, vec![writes(out, 2), reads(data, count)])
        }
        Kernel::CountUp => {
            let (dst, first, step, count) = (wide(0)?, narrow(1)?, narrow(2)?, wide(3)?);
            let work = Work::new(move |core| count_up(core, device, dst, (first, step), count));
            (work, vec![writes(dst, count)])
        }
        Kernel::Differs => {
            let (out, data, count) = (wide(0)?, wide(1)?, wide(4)?);
            let pattern = (narrow(2)?, narrow(3)?);
            let work = Work::new(move |core| differs(core, device, out, data, pattern, count));
            (work, vec![writes(out, 2), reads(data, count)])
        }
        Kernel::Store => {
            let (dst, value) = (wide(0)?, narrow(1)?);
            (Work::new(move |core| store(core, device, dst, value)), vec![writes(dst, 1)])
        }
        Kernel::Spin => {
            let flag = wide(0)?;
            let work = Work::new(move |core| wait_until(core, device, flag, |value| value != 0));
            (work, vec![reads(flag, 1)])
        }
        Kernel::WaitAtLeast => {
            let (flag, least) = (wide(0)?, narrow(1)?);
            let is_enough = move |value| value >= least;
            let work = Work::new(move |core| wait_until(core, device, flag, is_enough));
            (work, vec![reads(flag, 1)])
        }
        Kernel::FillStruct => {
            let Filled { dst, value, count, .. } = params[0].cast::<Filled>().get()?;
            let work = Work::new(move |core| fill(core, device, dst, value, count));
            (work, vec![writes(dst, count)])
        }
        Kernel::AddEach => {
            let Each { places, count, lists, .. } = params[0].cast::<Each>().get()?;
            let (add, lists) = (narrow(1)?, places.len().min(lists as usize));
            let touched = places[..lists].iter().map(|place| writes(*place, count)).collect();
            let work = Work::new(move |core| {
                let mut lists = places[..lists].iter();
                lists.try_for_each(|place| affine(core, device, *place, (1, add), count))
            });
            (work, touched)
        }
        Kernel::FillBehind => {
            let (list, value, count) = (wide(0)?, narrow(1)?, wide(2)?);
            let work = Work::new(move |core| {
                let dst = behind(core, device, list)?;
                fill(core, device, dst, value, count)
            });
            (work, vec![reads(list, 2)])
        }
        Kernel::Fingerprint => {
            let (slots, keys) = (wide(0)?, params[1].cast::<Keys>().get()?);
            let [blocks, 1, 1] = grid else { return Err(DriverCode::INVALID_VALUE) };
            let count = usize::try_from(blocks).map_err(|_| DriverCode::INVALID_VALUE)?;
            let work = Work::new(move |core| {
                // SAFETY: the caller that launches it keeps the slots until the stream has passed; they are registered.
                unsafe { core.fingerprint(device, (slots, count), keys) }
            });
            (work, Vec::new())
        }
    };
    Ok(work.touching(touched.into_iter().flatten()))
}

/// The sizes of a kernel's parameters, in bytes.
fn layout(kernel: Kernel) -> &'static [usize] {
    match kernel {
        Kernel::Fill | Kernel::FillBehind => &[8, 4, 8],
        Kernel::Add => &[8, 8, 8, 8],
        Kernel::Affine | Kernel::CountUp => &[8, 4, 4, 8],
        Kernel::Sum => &[8, 8, 8],
        Kernel::Differs => &[8, 8, 4, 4, 8],
        Kernel::Store | Kernel::WaitAtLeast => &[8, 4],
        Kernel::Spin => &[8],
        Kernel::Fingerprint => &[8, size_of::<Keys>()],
        Kernel::FillStruct => &[size_of::<Filled>()],
        Kernel::AddEach => &[size_of::<Each>(), 4],
    }
}

/// Offset and size of a parameter of a function of any device, in bytes.
pub(crate) fn parameter(function: u64, index: u64) -> Coded<(usize, usize)> {
    let device = function.checked_sub(FIRST).map(|offset| offset / DEVICE_STEP);
    let device = device.and_then(|device| i32::try_from(device).ok());
    let kernel = kernel_of(function, DeviceOrdinal(device.ok_or(DriverCode::INVALID_HANDLE)?))?;
    let (mut end, wanted) = (0_usize, usize::try_from(index).unwrap_or(usize::MAX));
    for (at, size) in layout(kernel).iter().enumerate() {
        let start = end.next_multiple_of((*size).min(8));
        if at == wanted {
            return Ok((start, *size));
        }
        end = start + size;
    }
    Err(DriverCode::INVALID_VALUE)
}

fn words(start: u64, count: u64) -> Coded<VaRange> {
    let size_bytes = count.checked_mul(U32_BYTES).ok_or(DriverCode::ILLEGAL_ADDRESS)?;
    Ok(VaRange::new(DeviceAddress(start), size_bytes))
}

/// Address of element `index` of the array at `start`.
fn element<T>(start: u64, index: u64) -> *mut T {
    let first: *mut T = std::ptr::with_exposed_provenance_mut(usize::try_from(start).unwrap_or(0));
    // A check for each element would take most of the time of a loop.
    first.wrapping_add(usize::try_from(index).unwrap_or(0))
}

/// Loads element `index` of a checked array.
///
/// # Safety
/// An access guard that covers the element is alive.
unsafe fn load(start: u64, index: u64) -> u32 {
    // SAFETY: the caller's guard keeps the element readable.
    unsafe { element::<u32>(start, index).read_unaligned() }
}

/// Stores element `index` of a checked array.
///
/// # Safety
/// An access guard that covers the element for writing is alive.
unsafe fn put(start: u64, index: u64, value: u32) {
    // SAFETY: the caller's guard keeps the element writable.
    unsafe { element::<u32>(start, index).write_unaligned(value) };
}

fn fill(core: &Core, device: DeviceOrdinal, dst: u64, value: u32, count: u64) -> Coded<()> {
    let _guard = core.access(device, &[(words(dst, count)?, Touch::Write)])?;
    for index in 0..count {
        // SAFETY: `_guard` covers `count` elements of `dst`.
        unsafe { put(dst, index, value) };
    }
    Ok(())
}

/// The address that lies at `list`.
fn behind(core: &Core, device: DeviceOrdinal, list: u64) -> Coded<u64> {
    let _guard = core.access(device, &[(words(list, 2)?, Touch::Read)])?;
    // SAFETY: `_guard` covers eight bytes at `list`.
    Ok(unsafe { element::<u64>(list, 0).read_unaligned() })
}

fn add(core: &Core, device: DeviceOrdinal, dst: u64, [a, b]: [u64; 2], count: u64) -> Coded<()> {
    let ranges = [
        (words(dst, count)?, Touch::Write),
        (words(a, count)?, Touch::Read),
        (words(b, count)?, Touch::Read),
    ];
    let _guard = core.access(device, &ranges)?;
    for index in 0..count {
        // SAFETY: `_guard` covers `count` elements of `a`.
        let left = unsafe { load(a, index) };
        // SAFETY: `_guard` covers `count` elements of `b`.
        let right = unsafe { load(b, index) };
        // SAFETY: `_guard` covers `count` elements of `dst`.
        unsafe { put(dst, index, left.wrapping_add(right)) };
    }
    Ok(())
}

fn affine(
    core: &Core,
    device: DeviceOrdinal,
    data: u64,
    (mul, add): (u32, u32),
    count: u64,
) -> Coded<()> {
    let _guard = core.access(device, &[(words(data, count)?, Touch::Write)])?;
    for index in 0..count {
        // SAFETY: `_guard` covers `count` elements of `data`.
        let value = unsafe { load(data, index) };
        let value = value.wrapping_mul(mul).wrapping_add(add);
        // SAFETY: as above.
        unsafe { put(data, index, value) };
    }
    Ok(())
}

fn sum(core: &Core, device: DeviceOrdinal, out: u64, data: u64, count: u64) -> Coded<()> {
    let ranges = [(words(out, 2)?, Touch::Write), (words(data, count)?, Touch::Read)];
    let _guard = core.access(device, &ranges)?;
    let mut total = 0_u64;
    for index in 0..count {
        // SAFETY: `_guard` covers `count` elements of `data`.
        total = total.wrapping_add(u64::from(unsafe { load(data, index) }));
    }
    // SAFETY: `_guard` covers eight bytes at `out`.
    unsafe { element::<u64>(out, 0).write_unaligned(total) };
    Ok(())
}

fn count_up(
    core: &Core,
    device: DeviceOrdinal,
    dst: u64,
    (first, step): (u32, u32),
    count: u64,
) -> Coded<()> {
    let _guard = core.access(device, &[(words(dst, count)?, Touch::Write)])?;
    let mut value = first;
    for index in 0..count {
        // SAFETY: `_guard` covers `count` elements of `dst`.
        unsafe { put(dst, index, value) };
        value = value.wrapping_add(step);
    }
    Ok(())
}

fn differs(
    core: &Core,
    device: DeviceOrdinal,
    out: u64,
    data: u64,
    (first, step): (u32, u32),
    count: u64,
) -> Coded<()> {
    let ranges = [(words(out, 2)?, Touch::Write), (words(data, count)?, Touch::Read)];
    let _guard = core.access(device, &ranges)?;
    let length = usize::try_from(count).map_err(|_| DriverCode::ILLEGAL_ADDRESS)?;
    let (mut total, mut wanted) = (0_u64, first);
    if length > 0 {
        // SAFETY: `_guard` covers `count` elements of `data`, which are of bytes and so need no alignment. Others may write
        // there, as on a device; the bytes are only looked at.
        let elements: &[[u8; 4]] = unsafe { std::slice::from_raw_parts(element(data, 0), length) };
        for value in elements {
            // OVERFLOW: at most `count`. A check for each element would take most of the time.
            total = total.wrapping_add(u64::from(u32::from_ne_bytes(*value) != wanted));
            wanted = wanted.wrapping_add(step);
        }
    }
    let sum: *mut u64 = element(out, 0);
    // SAFETY: `_guard` covers eight bytes at `out`.
    let before = unsafe { sum.read_unaligned() };
    // SAFETY: as above.
    unsafe { sum.write_unaligned(before + total) };
    Ok(())
}

/// Runs `body` on the word at `address` as an atomic, which other processes may share.
fn with_atomic<R>(
    core: &Core,
    device: DeviceOrdinal,
    address: u64,
    touch: Touch,
    body: impl FnOnce(&AtomicU32) -> R,
) -> Coded<R> {
    if !address.is_multiple_of(U32_BYTES) || address == 0 {
        return Err(DriverCode::ILLEGAL_ADDRESS);
    }
    let _guard = core.access(device, &[(words(address, 1)?, touch)])?;
    // SAFETY: aligned, not null, and kept mapped by `_guard`, which outlives the reference.
    let word = unsafe { AtomicU32::from_ptr(element(address, 0)) };
    Ok(body(word))
}

fn store(core: &Core, device: DeviceOrdinal, dst: u64, value: u32) -> Coded<()> {
    with_atomic(core, device, dst, Touch::Write, |word| {
        word.store(value, Ordering::Release);
    })
}

fn wait_until(
    core: &Core,
    device: DeviceOrdinal,
    flag: u64,
    is_enough: impl Fn(u32) -> bool,
) -> Coded<()> {
    let look = |word: &AtomicU32| is_enough(word.load(Ordering::Acquire));
    wait_for(core, device, || with_atomic(core, device, flag, Touch::Read, look))
}

/// Keeps a stream of `device` until `is_so`.
#[expect(
    clippy::disallowed_methods,
    reason = "a device has nothing to wait on but the memory itself"
)]
pub(crate) fn wait_for(
    core: &Core,
    device: DeviceOrdinal,
    is_so: impl Fn() -> Coded<bool>,
) -> Coded<()> {
    while !is_so()? {
        if core.is_closing() {
            return Err(DriverCode::DEINITIALIZED);
        }
        // With its context a kernel ends.
        core.device_failure(device)?;
        std::thread::sleep(POLL);
    }
    Ok(())
}
