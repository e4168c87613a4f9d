//! The windows of a process whose memory is paged, and plain memory of regions that lies there: `cuMemAlloc` in such a region gives
//! addresses of its window, and takes no device memory.
//!
//! Only what `cuMemAlloc` gives, of [`crate::BLOCK_BYTES_MIN`] and more. Other devices have no access to it, and no other process can
//! open it. A context that ends does not end it.
//!
//! The locks here come before those of windows; a window that is closed is asked under them if it is empty.

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
    /// The addresses that threads are about to free: nobody else has one, or frees what comes to lie there.
    freeing: Mutex<BTreeSet<DeviceAddress>>,
    freed: Condvar,
    /// The number of windows with regions, for callers that would find none.
    with_regions: AtomicUsize,
    /// The number of windows that were opened.
    opened: AtomicU64,
}

/// Windows of a process at some time: the lock is not held while a caller has them.
pub type WindowList<D> = Arc<[Window<D>]>;

/// One window.
#[derive(Debug)]
pub struct Window<D: Driver> {
    number: u64,
    /// Its pager.
    pub pager: Arc<Pager<D>>,
    /// The context that its pager works in, if there is one.
    pub context: Option<RawContext>,
    /// The tags of the regions whose memory lies there.
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
    /// None yet.
    pub const fn new() -> Self {
        Self {
            all: RwLock::new(None),
            freeing: Mutex::new(BTreeSet::new()),
            freed: Condvar::new(),
            with_regions: AtomicUsize::new(0),
            opened: AtomicU64::new(0),
        }
    }

    /// All that are open.
    pub fn list(&self) -> WindowList<D> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }

    /// Does `change` with the list and the place of the window with this number there, and then `then` before anybody sees the list.
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

    /// Opens a window, with its pager in `context`. `then` sees all windows before anybody has an address of it. Its number comes out.
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

    /// From now on memory that regions of `tag` ask for on the device of this window lies there. What they have stays as it is.
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

    /// This window is about to end: memory of its regions is ordinary memory from now on. `then` sees all others.
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

    /// Addresses for `size_bytes` on `device`, if `library` asks for them in a paged region. `None`: it is ordinary memory. Waits for
    /// nothing.
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
            // It is being closed.
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

    /// Frees the paged memory that begins at `address`: `settle` waits for the work of its device that may still use it. `None`: it is no
    /// paged region's.
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

/// No other thread frees what lies there.
#[derive(Debug)]
struct Claim<'a, D: Driver> {
    windows: &'a Windows<D>,
    address: DeviceAddress,
}

impl<'a, D: Driver> Claim<'a, D> {
    /// Waits for a thread that frees what lies there now.
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
