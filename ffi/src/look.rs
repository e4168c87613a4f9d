//! The launch look: it finds the window memory that a call to the driver names.
//!
//! Each call that gives work to a device is compared, word by word, with the addresses of all windows. The look reads a
//! kernel's parameters as the driver describes them, and the ranges of copies and fills. It also reads the structures that
//! describe a copy. The memory that is found must be on the device before the call is made. The thread waits for that outside of
//! the gate.
//!
//! | call | what is compared |
//! | --- | --- |
//! | launches | each 8 bytes of each parameter, also inside of structures; their layout is looked up once a function |
//! | copies, fills, waits for a value | the ranges that they are given |
//! | copies of two and three dimensions, batches of copies, of waits and of decompressions | the ranges that their structures and lists name |
//! | launches of graphs | nothing: what was captured stays on the device, and each launch counts as a use of it |
//!
//! Not seen: addresses stored in device memory or behind a pointer; `cuLaunchGrid` and older, and
//! `cuLaunchCooperativeKernelMultiDevice`; nodes that are added to a graph by hand; NCCL's collectives. They find correct
//! contents, or no mapping: [`sublet_pager`] maps a chunk only when its contents are complete.
//!
//! A call in another context than the window's pager returns only when its work has ended.
//!
//! In a process without windows a call costs one load more.

#![expect(unsafe_code, reason = "reads what callers give to the driver")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, PoisonError, RwLock};
use std::time::Duration;

use sublet_cuda_driver::paged::{Window, WindowList};
use sublet_pager::{In, PageError, PageResult, Pager, Touched};
use sublet_turns::Allocation;
use tenants::error_text::chain;
use vmm_pool::PoolError;
use vmm_pool::driver::{CudaDriver, DeviceAddress, DriverCode, RawContext, RawStream, VaRange};

use crate::contexts;
use crate::driver::{DRIVER, call_driver};
use crate::records::Record;
use crate::runtime;
use sublet_interpose::Pointer;

/// The longest time that a call waits for its memory. The time of a pause does not count.
const WAIT: Duration = Duration::from_mins(10);
/// The size of a compared word: an address.
const WORD_BYTES: usize = size_of::<u64>();
/// The most ranges of one call that need no allocation.
const FEW: usize = 8;
/// `CU_LAUNCH_PARAM_END`, `CU_LAUNCH_PARAM_BUFFER_POINTER` and `CU_LAUNCH_PARAM_BUFFER_SIZE`.
const EXTRA_END: usize = 0;
const EXTRA_BUFFER: usize = 1;
const EXTRA_SIZE: usize = 2;
/// The offset of the stream in a `CUlaunchConfig`: after seven sizes of four bytes.
const CONFIG_STREAM_OFFSET: usize = 32;

/// The addresses of all windows, as [`Hull::packed`] returns them; 0 means no window. It is one number, so that no look sees the
/// beginning of one hull and the end of another.
static HULL: AtomicU64 = AtomicU64::new(0);
/// The unit of its two halves: 32 bits are enough for any address.
const HULL_UNIT_BITS: u32 = 25;
/// The parameters of each function that are compared.
static LAYOUTS: LazyLock<RwLock<HashMap<usize, Layout>>> = LazyLock::new(RwLock::default);

/// The place and size of each parameter that an address fits into. `None`: the driver does not describe them.
type Layout = Option<Box<[(usize, usize)]>>;

/// Returns the place of a call's work for a window whose pager works in `context`. The pager's events cannot follow a stream of
/// another context.
fn place_in(context: Option<RawContext>, place: In, current: Option<RawContext>) -> In {
    match place {
        In::Stream(raw) | In::OwnStream(raw) if current != context => {
            // A pause waits for its work too.
            contexts::listed_current();
            In::Elsewhere(raw)
        }
        here @ (In::Stream(_) | In::OwnStream(_) | In::Elsewhere(_) | In::Graph) => here,
    }
}

/// Is there any window to look for?
pub(crate) fn is_on() -> bool {
    HULL.load(Ordering::Relaxed) != 0
}

/// Sets the windows to look for: these are all.
pub(crate) fn at(windows: &[Window<CudaDriver>]) {
    let ranges = windows.iter().map(|known| known.pager.window());
    let hull = ranges.map(|range| (range.start.0, range.end().0));
    let hull = hull.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
    HULL.store(hull.map_or(0, |(first, end)| Hull::packed(first, end)), Ordering::SeqCst);
}

/// The parts of a call to the driver that name memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Names<'a> {
    Kernel {
        function: Pointer,
        parameters: Pointer,
        extra: Pointer,
    },
    Ranges(&'a [VaRange]),
    /// A number of structures of this form.
    Records(Pointer, &'static Record, usize),
    /// Two lists of addresses, a list of sizes in bytes, and their length.
    Lists([Pointer; 2], Pointer, usize),
}

/// Returns the stream of a `CUlaunchConfig`.
pub(crate) fn stream_of(config: Pointer) -> Pointer {
    if config.is_null() {
        return config;
    }
    // SAFETY: the caller's structure of this layout.
    unsafe { config.wrapping_byte_add(CONFIG_STREAM_OFFSET).cast::<Pointer>().read_unaligned() }
}

/// Ranges of windows that a call names. It allocates for calls that name more than a few.
#[derive(Debug)]
pub(crate) struct Found {
    few: [VaRange; FEW],
    count: usize,
    /// All ranges, if they are more than `few` holds.
    many: Vec<VaRange>,
}

impl Found {
    fn new() -> Self {
        Self { few: [VaRange::new(DeviceAddress(0), 0); FEW], count: 0, many: Vec::new() }
    }

    fn push(&mut self, range: VaRange) {
        if self.count < FEW {
            self.few[self.count] = range;
        } else {
            if self.many.is_empty() {
                self.many.extend(self.few);
            }
            self.many.push(range);
        }
        self.count += 1;
    }

    /// Returns all ranges.
    pub(crate) fn ranges(&self) -> &[VaRange] {
        if self.many.is_empty() { &self.few[..self.count] } else { &self.many }
    }
}

/// Calls `work` with each range that a call other than a launch names.
pub(crate) fn each_range(names: Names<'_>, mut work: impl FnMut(VaRange)) {
    match names {
        Names::Ranges(ranges) => ranges.iter().copied().for_each(work),
        // SAFETY: the caller's structures.
        Names::Records(place, form, count) => unsafe { form.each_range(place, count, work) },
        Names::Lists(places, sizes, count) => {
            for place in places.into_iter().filter(|place| !place.is_null() && !sizes.is_null()) {
                for at in 0..count {
                    // SAFETY: the caller's lists of this length.
                    let [start, bytes] = [place, sizes].map(|list| unsafe {
                        list.cast::<u64>().wrapping_add(at).read_unaligned()
                    });
                    work(VaRange::new(DeviceAddress(start), bytes));
                }
            }
        }
        Names::Kernel { .. } => {}
    }
}

/// Returns the ranges of windows that a call names.
pub(crate) fn found(names: Names<'_>) -> Found {
    let hull = Hull::of(HULL.load(Ordering::Acquire));
    let mut found = Found::new();
    match names {
        Names::Kernel { function, parameters, extra } => {
            if !parameters.is_null() {
                in_parameters(hull, function, parameters, &mut found);
            } else if !extra.is_null() {
                in_extra(hull, extra, &mut found);
            }
        }
        Names::Ranges(_) | Names::Records(..) | Names::Lists(..) => each_range(names, |range| {
            let last = range.start.0.saturating_add(range.size_bytes.saturating_sub(1));
            if range.size_bytes > 0 && (hull.has(range.start.0) || hull.has(last)) {
                found.push(range);
            }
        }),
    }
    found
}

#[derive(Clone, Copy, Debug)]
struct Hull {
    first: u64,
    bytes: u64,
}

impl Hull {
    /// Packs the addresses from `first` to `end`, with up to 32 MiB more on either side: a look may find too much, never too
    /// little.
    fn packed(first: u64, end: u64) -> u64 {
        let end = end.div_ceil(1 << HULL_UNIT_BITS).min(u64::from(u32::MAX));
        (first >> HULL_UNIT_BITS) << u32::BITS | end
    }

    fn of(packed: u64) -> Self {
        let first = packed >> u32::BITS << HULL_UNIT_BITS;
        let end = (packed & u64::from(u32::MAX)) << HULL_UNIT_BITS;
        Self { first, bytes: end - first }
    }

    fn has(self, address: u64) -> bool {
        address.wrapping_sub(self.first) < self.bytes
    }
}

fn in_parameters(hull: Hull, function: Pointer, parameters: Pointer, found: &mut Found) {
    with_layout(function, |layout| {
        for (index, size) in layout.iter().flatten() {
            let place = parameters.cast::<Pointer>().wrapping_add(*index);
            // SAFETY: the caller's list has a pointer for each parameter of the function.
            let value = unsafe { place.read_unaligned() };
            // SAFETY: which leads to a value of this size.
            unsafe { in_words(hull, value, *size, found) };
        }
    });
}

fn in_extra(hull: Hull, extra: Pointer, found: &mut Found) {
    let (mut buffer, mut size, mut at) = (std::ptr::null_mut(), 0, extra.cast::<Pointer>());
    loop {
        // SAFETY: the caller's list of pairs, which ends with its mark.
        let key = unsafe { at.read_unaligned() }.addr();
        if key == EXTRA_END {
            break;
        }
        // SAFETY: each key has a value behind it.
        let value = unsafe { at.wrapping_add(1).read_unaligned() };
        match key {
            EXTRA_BUFFER => buffer = value,
            // SAFETY: this value leads to a size.
            EXTRA_SIZE => size = unsafe { value.cast::<usize>().read_unaligned() },
            _ => return,
        }
        at = at.wrapping_add(2);
    }
    // SAFETY: the caller's buffer of this size.
    unsafe { in_words(hull, buffer, size, found) };
}

/// # Safety
/// `place` is null, or valid for reads of `bytes` bytes.
unsafe fn in_words(hull: Hull, place: Pointer, bytes: usize, found: &mut Found) {
    if place.is_null() {
        return;
    }
    for offset in (0..bytes / WORD_BYTES).map(|index| index * WORD_BYTES) {
        // SAFETY: inside of what the caller vouches for.
        let word = unsafe { place.wrapping_byte_add(offset).cast::<u64>().read_unaligned() };
        if hull.has(word) {
            found.push(VaRange::new(DeviceAddress(word), 1));
        }
    }
}

/// Calls `work` with the compared parameters of a function, or of a kernel of a library: launches take both.
fn with_layout(function: Pointer, work: impl FnOnce(&Layout)) {
    let key = function.addr();
    let layouts = LAYOUTS.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = layouts.get(&key) {
        return work(known);
    }
    drop(layouts);
    let layout = ask_layout(function);
    work(&layout);
    LAYOUTS.write().unwrap_or_else(PoisonError::into_inner).insert(key, layout);
}

fn ask_layout(function: Pointer) -> Layout {
    let layout = asked(|index, offset, size| {
        call_driver!(cuFuncGetParamInfo(
            function => Pointer, index => usize, offset => *mut usize, size => *mut usize
        ))
    })
    .or_else(|| {
        asked(|index, offset, size| {
            call_driver!(cuKernelGetParamInfo(
                function => Pointer, index => usize, offset => *mut usize, size => *mut usize
            ))
        })
    });
    if layout.is_none()
        && let Some(member) = runtime::member()
    {
        // A kernel may use paged memory that Sublet does not bring back for it, and then the context ends. Keep paged
        // memory out of this kernel, or install a driver for CUDA 12.4 or newer.
        member.notes().add(
            "the driver does not describe the parameters of a kernel: uses of paged memory by it are not seen"
                .to_owned(),
        );
    }
    layout
}

/// Returns all parameters that an address fits into. `ask` describes a parameter by index, and answers `CUDA_ERROR_INVALID_VALUE`
/// after the last.
fn asked(ask: impl Fn(usize, *mut usize, *mut usize) -> c_int) -> Layout {
    let mut fit = Vec::new();
    for index in 0.. {
        let (mut offset, mut size) = (0, 0);
        match DriverCode(ask(index, &raw mut offset, &raw mut size)) {
            DriverCode::SUCCESS if size < WORD_BYTES => {}
            DriverCode::SUCCESS => fit.push((index, size)),
            DriverCode::INVALID_VALUE => return Some(fit.into()),
            _ => break,
        }
    }
    None
}

/// Forgets the layouts of functions, because some end: their values may be reused for others.
pub(crate) fn forget_functions() {
    // This is done even while no window is open: old layouts would be used again with the next window.
    LAYOUTS.write().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Does this driver describe the parameters of kernels? It does from 12.4 on.
pub(crate) fn is_possible() -> bool {
    DRIVER.symbol(c"cuFuncGetParamInfo").is_some()
}

/// Notes that `stream` is about to end.
pub(crate) fn stream_ends(stream: Pointer) {
    if is_on() {
        let raw = RawStream(stream.expose_provenance() as u64);
        let current = contexts::current_context();
        for Window { pager, context, .. } in &*runtime::WINDOWS.list() {
            pager.stream_ends(raw, current == *context);
        }
    }
}

/// Notes that a capture is about to begin. The caller is not inside the gate.
pub(crate) fn capture_begins() {
    if is_on() {
        runtime::WINDOWS.list().iter().for_each(|known| known.pager.capture_begins());
    }
}

/// Keeps the memory that a call uses on the device, at least until this value is dropped. It is dropped when the driver has the
/// call.
#[derive(Debug)]
pub(crate) struct StaysInUse {
    windows: WindowList<CudaDriver>,
    /// The use of one window, by the window's index. Few calls use memory of two.
    first: Option<(usize, Touched)>,
    others: Vec<(usize, Touched)>,
}

impl StaysInUse {
    fn new() -> Self {
        Self { windows: runtime::WINDOWS.list(), first: None, others: Vec::new() }
    }

    /// Begins a use in each window whose memory is named. `None` if there is no such window.
    fn begin<E>(
        mut self,
        place: In,
        begin: impl Fn(&Pager<CudaDriver>, In) -> Result<Option<Touched>, E>,
    ) -> Result<Option<Self>, E> {
        let current = contexts::current_context();
        for (index, Window { pager, context, .. }) in self.windows.iter().enumerate() {
            let Some(touched) = begin(pager, place_in(*context, place, current))? else { continue };
            if self.first.is_none() {
                self.first = Some((index, touched));
            } else {
                self.others.push((index, touched));
            }
        }
        Ok(self.first.is_some().then_some(self))
    }
}

impl Drop for StaysInUse {
    fn drop(&mut self) {
        for (window, touched) in self.first.iter().chain(&self.others) {
            self.windows[*window].pager.end_call(touched);
        }
    }
}

/// Waits until the memory that was [`found`] is on the device.
///
/// # Errors
/// The code that the call is to return.
pub(crate) fn begin(symbol: &str, found: &Found, place: In) -> Result<Option<StaysInUse>, c_int> {
    let begun = StaysInUse::new().begin(place, |pager, place| {
        with_room(pager, found.ranges(), || pager.begin_call(found.ranges(), place, WAIT))
    });
    begun.map_err(|error| {
        if let Some(member) = runtime::member() {
            // A driver call names paged memory, and the pager could not bring it to the GPU. The call failed, and no
            // contents are lost. Look up the reason that follows: often the frames are too few.
            member.notes().add(format!("{symbol} was refused: {}", chain(&error)));
        }
        code_of(&error).0
    })
}

/// Calls `make`, which moves paged memory in `ranges` to the device. If the device is full and the process takes turns, waits for
/// room and tries again. The caller is not inside the gate.
///
/// # Errors
/// The last error of `make`.
pub(crate) fn with_room<T>(
    pager: &Pager<CudaDriver>,
    ranges: &[VaRange],
    mut make: impl FnMut() -> PageResult<T>,
) -> PageResult<T> {
    match make() {
        Err(error) if is_full(&error) => {}
        done => return done,
    }
    let Some(member) = runtime::member() else { return make() };
    let size_bytes = ranges.iter().map(|range| range.size_bytes).sum();
    let device = Some(pager.device());
    let allocation = Allocation { device, size_bytes, is_asked_twice: false, may_wait: true };
    sublet_turns::wait_for_room(member, allocation, is_full, make)
}

fn is_full(error: &PageError) -> bool {
    if let PageError::Shared(error) = error {
        return is_full(error);
    }
    let is_drivers = matches!(error, PageError::Pool(PoolError::Driver { .. }));
    is_drivers && code_of(error) == DriverCode::OUT_OF_MEMORY
}

/// Begins the use of a graph that is about to be launched at `place`. Its memory is on the device already.
pub(crate) fn begin_graph(place: impl FnOnce() -> In) -> Option<StaysInUse> {
    if !is_on() {
        return None;
    }
    let seen = StaysInUse::new();
    if !seen.windows.iter().any(|known| known.pager.has_captured()) {
        return None;
    }
    let device = contexts::current_device().ok();
    let begun = seen.begin(place(), |pager, place| {
        let is_meant = Some(pager.device()) == device;
        Ok::<_, Infallible>(is_meant.then(|| pager.begin_graph(place)).flatten())
    });
    begun.unwrap_or(None)
}

fn code_of(error: &PageError) -> DriverCode {
    match error {
        PageError::TooFewFrames { .. } | PageError::OutOfHostMemory { .. } => {
            DriverCode::OUT_OF_MEMORY
        }
        PageError::Late { .. } => DriverCode::LAUNCH_TIMEOUT,
        PageError::Shared(error) => code_of(error),
        PageError::Pool(error) => error.code().unwrap_or(DriverCode::UNKNOWN),
        PageError::WindowFull { .. }
        | PageError::UnfitChunk { .. }
        | PageError::NoBytes
        | PageError::NotPaged { .. }
        | PageError::Ended { .. }
        | PageError::NoThread(_) => DriverCode::UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hull_has_both_ends_of_what_it_was_made_of() {
        for first in [0, 1 << 21, (1 << 47) - (3 << 21), (1 << 56) + (1 << 21)] {
            for bytes in [1, 1 << 21, (1 << 40) + (1 << 21)] {
                let hull = Hull::of(Hull::packed(first, first + bytes));
                assert!(hull.has(first) && hull.has(first + bytes - 1), "{first} {bytes} {hull:?}");
                assert!(
                    !hull.has(first + bytes + (1 << HULL_UNIT_BITS)),
                    "{first} {bytes} {hull:?}"
                );
                assert!(
                    !hull.has(first.wrapping_sub((1 << HULL_UNIT_BITS) + 1)),
                    "{first} {hull:?}"
                );
            }
        }
        assert!(!Hull::of(0).has(0));
    }

    #[test]
    fn all_that_is_found_is_there_also_behind_the_first_few() {
        let range = |at: usize| VaRange::new(DeviceAddress(at as u64), 1);
        let mut found = Found::new();
        for count in 0..3 * FEW {
            assert_eq!(found.ranges(), (0..count).map(range).collect::<Vec<_>>());
            found.push(range(count));
        }
    }

    #[test]
    fn all_parameters_are_looked_at_that_an_address_fits_into() {
        let sizes = [8, 4, 64, 8, 2, 8, 8, 8, 8, 8, 16, 8];
        let told = asked(|index, _, size| {
            let Some(told) = sizes.get(index) else { return DriverCode::INVALID_VALUE.0 };
            // SAFETY: the place of a number.
            unsafe { size.write(*told) };
            DriverCode::SUCCESS.0
        });
        let fit = sizes.into_iter().enumerate().filter(|(_, size)| *size >= WORD_BYTES);
        assert_eq!(told, Some(fit.collect()));
        assert_eq!(asked(|_, _, _| DriverCode::NOT_SUPPORTED.0), None);
    }

    #[test]
    fn another_function_may_have_the_value_of_one_that_has_ended() {
        let known = || LAYOUTS.read().unwrap().contains_key(&usize::MAX);
        LAYOUTS.write().unwrap().insert(usize::MAX, Some([(0, WORD_BYTES)].into()));
        assert!(known());
        forget_functions();
        assert!(!known());
    }
}
