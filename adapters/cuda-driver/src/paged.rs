//! The windows of a process whose memory is paged, and the plain memory of regions there. `cuMemAlloc` in such a region returns
//! addresses of its window, and takes no device memory.
//!
//! Only memory of `cuMemAlloc`, of [`crate::BLOCK_BYTES_MIN`] and more, is paged. Other devices have no access to it, and no
//! other process can open it. It does not end with a context.
//!
//! The locks here come before those of windows. A window that is being closed is checked for memory under them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};

use sublet_pager::{PageError, Pager};
use tenants::member::Member;
use tenants::region::{self, RegionError};
use vmm_pool::PoolError;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Driver, DriverCode, RawContext, VaRange};
use vmm_pool::sync::lock;

use crate::Answer;
use crate::blocks::give_up;

/// All windows of a process.
#[derive(Debug)]
pub struct Windows<D: Driver> {
    all: RwLock<Option<WindowList<D>>>,
    /// The addresses that threads are about to free. While an address is here, nobody else can get or free it.
    freeing: Mutex<BTreeSet<DeviceAddress>>,
    freed: Condvar,
    /// The number of windows with regions, so that callers need not search when there are none.
    with_regions: AtomicUsize,
    /// The number of windows that were opened.
    opened: AtomicU64,
}

/// The windows of a process at one time. A caller uses the list without the lock.
pub type WindowList<D> = Arc<[Window<D>]>;

/// One window.
#[derive(Debug)]
pub struct Window<D: Driver> {
    number: u64,
    /// The pager of this window.
    pub pager: Arc<Pager<D>>,
    /// The context that the pager works in, if there is one.
    pub context: Option<RawContext>,
    /// The tags of the regions whose memory is in this window.
    tags: BTreeSet<String>,
}

/// Why a region cannot be paged in a window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PagedRegionError {
    /// The tag is none, or has other contents.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The program closes a window of paged memory that still has memory in it. The window stays open. In C, free all
    /// of it (`cuMemFree`, `sublet_page_free`), then call `sublet_page_close`.
    #[error(
        "memory lies in this window, which tag '{tag}' has: free all of it before the window is closed"
    )]
    InUse {
        /// The tag.
        tag: String,
    },
    /// A tag has one window on each GPU, and this one exists already. Nothing was changed. In Python, call
    /// `sublet.set_frames(TAG, SIZE)` to change its size.
    #[error("memory of tag '{tag}' on {device} has a window already: change its frames instead")]
    Twice {
        /// The tag.
        tag: String,
        /// The device.
        device: DeviceOrdinal,
    },
}

impl<D: Driver> Windows<D> {
    /// Makes an empty list of windows.
    pub const fn new() -> Self {
        Self {
            all: RwLock::new(None),
            freeing: Mutex::new(BTreeSet::new()),
            freed: Condvar::new(),
            with_regions: AtomicUsize::new(0),
            opened: AtomicU64::new(0),
        }
    }

    /// Returns all open windows.
    pub fn list(&self) -> WindowList<D> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }

    /// Runs `change` with the list and the place of the window with this number in it. Then runs `then`, before anybody sees
    /// the new list.
    fn change<T>(
        &self,
        number: u64,
        change: impl FnOnce(&mut Vec<Window<D>>, usize) -> T,
        then: impl FnOnce(&[Window<D>]),
    ) -> Option<T> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let mut list = all.as_deref().unwrap_or_default().to_vec();
        let place = list.iter().position(|known| known.number == number)?;
        let done = change(&mut list, place);
        then(&list);
        let with_regions = list.iter().filter(|known| !known.tags.is_empty()).count();
        self.with_regions.store(with_regions, Ordering::Release);
        *all = Some(list.into());
        Some(done)
    }

    /// Opens a window, with its pager in `context`. `then` sees all windows before anybody has an address of the new one.
    /// Returns its number.
    pub fn open(
        &self,
        pager: Pager<D>,
        context: Option<RawContext>,
        then: impl FnOnce(&[Window<D>]),
    ) -> u64 {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let number = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        let pager = Arc::new(pager);
        let new = Window { number, pager, context, tags: BTreeSet::new() };
        let list: WindowList<D> =
            all.iter().flat_map(|all| all.iter().cloned()).chain([new]).collect();
        then(&list);
        *all = Some(list);
        number
    }

    /// Returns the pager of the window with this number.
    pub fn pager(&self, number: u64) -> Option<Arc<Pager<D>>> {
        self.find(|known| known.number == number)
    }

    /// Puts new memory of regions of `tag` on this window's device into the window, from now on. Their present memory stays
    /// where it is.
    ///
    /// # Errors
    /// [`PagedRegionError`]: nothing has changed.
    pub fn page(&self, number: u64, tag: &str) -> Result<(), PagedRegionError> {
        let set = |all: &mut Vec<Window<D>>, place: usize| {
            region::page(tag)?;
            let device = all[place].pager.device();
            if all.iter().any(|known| known.is_for(tag, device)) {
                return Err(PagedRegionError::Twice { tag: tag.to_owned(), device });
            }
            all[place].tags.insert(tag.to_owned());
            Ok(())
        };
        self.change(number, set, |_| {}).unwrap_or(Ok(()))
    }

    /// Closes this window, which is about to end: new memory of its regions is ordinary memory from now on. `then` sees all
    /// other windows.
    ///
    /// # Errors
    /// [`PagedRegionError::InUse`].
    pub fn close(
        &self,
        number: u64,
        then: impl FnOnce(&[Window<D>]),
    ) -> Result<Option<Arc<Pager<D>>>, PagedRegionError> {
        let remove = |all: &mut Vec<Window<D>>, place: usize| {
            let Window { pager, tags, .. } = &all[place];
            if let Some(tag) = tags.first().filter(|_| !pager.close_if_empty()) {
                return Err(PagedRegionError::InUse { tag: tag.clone() });
            }
            let gone = all.remove(place);
            // Another device may have a window of the same tag.
            let is_last = |tag: &&String| !all.iter().any(|known| known.tags.contains(*tag));
            gone.tags.iter().filter(is_last).for_each(|tag| region::page_no_more(tag));
            Ok(gone.pager)
        };
        self.change(number, remove, then).transpose()
    }

    fn has_no_regions(&self) -> bool {
        self.with_regions.load(Ordering::Acquire) == 0
    }

    fn find(&self, is_it: impl Fn(&Window<D>) -> bool) -> Option<Arc<Pager<D>>> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let found = all.as_deref().unwrap_or_default().iter().find(|known| is_it(known));
        found.map(|known| Arc::clone(&known.pager))
    }

    fn window_of(&self, address: DeviceAddress) -> Option<Arc<Pager<D>>> {
        if self.has_no_regions() {
            return None;
        }
        self.find(|it| !it.tags.is_empty() && it.pager.window().contains_address(address))
    }

    /// Returns addresses for `size_bytes` on `device`, if `library` requests them in a paged region. `None`: the memory is
    /// ordinary. Waits for nothing.
    #[doc(alias = "cuMemAlloc")]
    pub fn allocate(
        &self,
        member: &Member<D>,
        device: DeviceOrdinal,
        size_bytes: u64,
        library: &'static str,
    ) -> Option<Answer<DeviceAddress>> {
        if self.has_no_regions() {
            return None;
        }
        let tag = region::class_of(library, Some(device)).tag;
        let pager = self.find(|known| known.is_for(&tag, device))?;
        match pager.alloc(size_bytes) {
            Ok(address) => Some(Answer::Done(address)),
            // The window is being closed.
            Err(PageError::Ended { .. }) => None,
            Err(error) => {
                member
                    .notes()
                    .add(format!("{size_bytes} bytes of the paged region '{tag}': {error}"));
                Some(Answer::Refused(DriverCode::OUT_OF_MEMORY))
            }
        }
    }

    /// Is there paged memory of a region at `address`?
    pub fn has(&self, address: DeviceAddress) -> bool {
        self.window_of(address).is_some()
    }

    /// Frees the paged memory that begins at `address`. `settle` waits for the work of its device that may still use it.
    /// `None`: no paged region has memory there.
    #[doc(alias = "cuMemFree")]
    pub fn free(
        &self,
        member: &Member<D>,
        address: DeviceAddress,
        settle: impl FnOnce(DeviceOrdinal) -> DriverCode,
    ) -> Option<Answer<()>> {
        let pager = self.window_of(address)?;
        let _claim = Claim::new(self, address);
        let is_start = pager.span_at(address).is_some_and(|span| span.start == address);
        let freed = is_start.then(|| {
            let entered = member.pool().enter_giving_up();
            let free = || pager.free(address).map_err(|_| PoolError::NotOurs);
            give_up(&entered, || settle(pager.device()), free)
        });
        Some(match freed {
            None | Some(Answer::AskDriver) => Answer::Refused(DriverCode::INVALID_VALUE),
            Some(answer) => answer,
        })
    }

    /// Returns the range that was allocated in a paged region and holds `address`.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_of(&self, address: DeviceAddress) -> Option<VaRange> {
        self.window_of(address)?.span_at(address)
    }
}

impl<D: Driver> Clone for Window<D> {
    fn clone(&self) -> Self {
        Self { pager: Arc::clone(&self.pager), tags: self.tags.clone(), ..*self }
    }
}

impl<D: Driver> Window<D> {
    fn is_for(&self, tag: &str, device: DeviceOrdinal) -> bool {
        self.tags.contains(tag) && self.pager.device() == device
    }
}

/// The right to free the memory at an address. No other thread frees it meanwhile.
#[derive(Debug)]
struct Claim<'a, D: Driver> {
    windows: &'a Windows<D>,
    address: DeviceAddress,
}

impl<'a, D: Driver> Claim<'a, D> {
    /// Waits for a thread that is freeing the memory at this address.
    fn new(windows: &'a Windows<D>, address: DeviceAddress) -> Self {
        let is_claimed = |freeing: &mut BTreeSet<DeviceAddress>| freeing.contains(&address);
        let waited = windows.freed.wait_while(lock(&windows.freeing), is_claimed);
        waited.unwrap_or_else(PoisonError::into_inner).insert(address);
        Self { windows, address }
    }
}

impl<D: Driver> Drop for Claim<'_, D> {
    fn drop(&mut self) {
        lock(&self.windows.freeing).remove(&self.address);
        self.windows.freed.notify_all();
    }
}

impl<D: Driver> Default for Windows<D> {
    fn default() -> Self {
        Self::new()
    }
}
