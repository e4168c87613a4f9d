//! Plain memory of regions that are paged: `cuMemAlloc` in such a region gives addresses of its window, and takes no device memory.
//!
//! Only what `cuMemAlloc` gives, of [`crate::BLOCK_BYTES_MIN`] and more. Other devices have no access to it, and no other process can
//! open it. A context that ends does not end it.
//!
//! The locks here come before those of windows; a window that is closed is asked under them if it is empty.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};

use tenants::member::Member;
use tenants::region::{self, RegionError};
use vmm_pool::PoolError;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Driver, DriverCode, VaRange};
use vmm_pool::paging::{PageError, Pager};
use vmm_pool::sync::lock;

use crate::Answer;
use crate::blocks::give_up;

/// All of a process.
#[derive(Debug)]
pub struct PagedRegions<D: Driver> {
    all: RwLock<Vec<PagedRegion<D>>>,
    /// The addresses that threads are about to free: nobody else has one, or frees what comes to lie there.
    freeing: Mutex<BTreeSet<DeviceAddress>>,
    freed: Condvar,
    /// The number of regions, for callers that would find none.
    count: AtomicUsize,
}

#[derive(Debug)]
struct PagedRegion<D: Driver> {
    tag: String,
    pager: Arc<Pager<D>>,
}

/// Why a region cannot be paged in a window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PagedRegionError {
    /// The tag is none, or has other contents.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Nobody would say when its memory is used.
    #[error(
        "this window does not look for uses, which memory of a region needs: call sublet_page_look first"
    )]
    NotLooked,
    /// The window is about to end, and somebody has memory of it.
    #[error(
        "memory lies in this window, which tag '{tag}' has: free all of it before the window is closed"
    )]
    InUse {
        /// The tag.
        tag: String,
    },
    /// The tag has a window on this device.
    #[error("memory of tag '{tag}' on {device} has a window already: change its frames instead")]
    Twice {
        /// The tag.
        tag: String,
        /// The device.
        device: DeviceOrdinal,
    },
}

impl<D: Driver> PagedRegions<D> {
    /// None yet.
    pub const fn new() -> Self {
        Self {
            all: RwLock::new(Vec::new()),
            freeing: Mutex::new(BTreeSet::new()),
            freed: Condvar::new(),
            count: AtomicUsize::new(0),
        }
    }

    /// From now on memory that regions of `tag` ask for on the device of `pager` lies in its window. What they have stays as it is.
    ///
    /// # Errors
    /// [`PagedRegionError`]: nothing has changed.
    pub fn add(&self, tag: &str, pager: Arc<Pager<D>>) -> Result<(), PagedRegionError> {
        if !pager.is_looked() {
            return Err(PagedRegionError::NotLooked);
        }
        region::page(tag)?;
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let device = pager.device();
        if all.iter().any(|known| known.tag == tag && known.pager.device() == device) {
            return Err(PagedRegionError::Twice { tag: tag.to_owned(), device });
        }
        all.push(PagedRegion { tag: tag.to_owned(), pager });
        self.count.store(all.len(), Ordering::Release);
        Ok(())
    }

    /// The window is about to end: memory of its regions is ordinary memory from now on.
    ///
    /// # Errors
    /// [`PagedRegionError::InUse`].
    pub fn remove(&self, pager: &Arc<Pager<D>>) -> Result<(), PagedRegionError> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let mut of_window = all.iter().filter(|known| Arc::ptr_eq(&known.pager, pager));
        if let Some(known) = of_window.next().filter(|_| !pager.close_if_empty()) {
            return Err(PagedRegionError::InUse { tag: known.tag.clone() });
        }
        let gone: Vec<_> = all.extract_if(.., |known| Arc::ptr_eq(&known.pager, pager)).collect();
        for tag in gone.into_iter().map(|gone| gone.tag) {
            // Another device may have a window of it.
            if !all.iter().any(|known| known.tag == tag) {
                region::page_no_more(&tag);
            }
        }
        self.count.store(all.len(), Ordering::Release);
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    fn find(&self, is_it: impl Fn(&PagedRegion<D>) -> bool) -> Option<Arc<Pager<D>>> {
        if self.is_empty() {
            return None;
        }
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|known| is_it(known)).map(|known| Arc::clone(&known.pager))
    }

    fn window_of(&self, address: DeviceAddress) -> Option<Arc<Pager<D>>> {
        self.find(|known| known.pager.window().contains_address(address))
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
        if self.is_empty() {
            return None;
        }
        let tag = region::class_of(library, Some(device)).tag;
        let pager = self.find(|known| known.tag == tag && known.pager.device() == device)?;
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
        let freed = if is_start {
            let entered = member.pool().enter_giving_up();
            let free = || pager.free(address).map_err(|_| PoolError::NotOurs);
            give_up(&entered, || settle(pager.device()), free)
        } else {
            Answer::Refused(DriverCode::INVALID_VALUE)
        };
        Some(match freed {
            Answer::AskDriver => Answer::Refused(DriverCode::INVALID_VALUE),
            answer @ (Answer::Done(()) | Answer::Refused(_)) => answer,
        })
    }

    /// Returns the range that was allocated in a paged region and holds `address`.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_of(&self, address: DeviceAddress) -> Option<VaRange> {
        self.window_of(address)?.span_at(address)
    }
}

/// No other thread frees what lies there.
#[derive(Debug)]
struct Claim<'a, D: Driver> {
    regions: &'a PagedRegions<D>,
    address: DeviceAddress,
}

impl<'a, D: Driver> Claim<'a, D> {
    /// Waits for a thread that frees what lies there now.
    fn new(regions: &'a PagedRegions<D>, address: DeviceAddress) -> Self {
        let is_claimed = |freeing: &mut BTreeSet<DeviceAddress>| freeing.contains(&address);
        let waited = regions.freed.wait_while(lock(&regions.freeing), is_claimed);
        waited.unwrap_or_else(PoisonError::into_inner).insert(address);
        Self { regions, address }
    }
}

impl<D: Driver> Drop for Claim<'_, D> {
    fn drop(&mut self) {
        lock(&self.regions.freeing).remove(&self.address);
        self.regions.freed.notify_all();
    }
}

impl<D: Driver> Default for PagedRegions<D> {
    fn default() -> Self {
        Self::new()
    }
}
