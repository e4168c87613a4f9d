//! Plain memory of regions that are paged: `cuMemAlloc` in such a region gives addresses of its window, and takes no device memory.
//!
//! Only what `cuMemAlloc` gives, of [`crate::BLOCK_BYTES_MIN`] and more. Other devices have no access to it, and no other process can
//! open it. A context that ends does not end it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use tenants::member::Member;
use tenants::region::{self, RegionError};
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Driver, DriverCode, VaRange};
use vmm_pool::paging::{PageError, Pager};
use vmm_pool::{Contents, PoolError};

use crate::Answer;
use crate::blocks::give_up;

/// All of a process. The lock is a leaf of callers, and is not held across calls into a window.
#[derive(Debug)]
pub struct PagedRegions<D: Driver> {
    all: RwLock<Vec<PagedRegion<D>>>,
    /// How many there are, for callers that would find none.
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
        Self { all: RwLock::new(Vec::new()), count: AtomicUsize::new(0) }
    }

    fn all(&self) -> RwLockReadGuard<'_, Vec<PagedRegion<D>>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on memory that regions of `tag` ask for on the device of `pager` lies in its window. What they have stays as it is.
    ///
    /// # Errors
    /// [`PagedRegionError`]: nothing has changed.
    pub fn add(&self, tag: &str, pager: Arc<Pager<D>>) -> Result<(), PagedRegionError> {
        if !pager.is_looked() {
            return Err(PagedRegionError::NotLooked);
        }
        region::fix(tag, Contents::Keep)?;
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
    pub fn remove(&self, pager: &Arc<Pager<D>>) {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|known| !Arc::ptr_eq(&known.pager, pager));
        self.count.store(all.len(), Ordering::Release);
    }

    fn find(&self, is_it: impl Fn(&PagedRegion<D>) -> bool) -> Option<Arc<Pager<D>>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let all = self.all();
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
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let tag = region::class_of(library, Some(device)).tag;
        let pager = self.find(|known| known.tag == tag && known.pager.device() == device)?;
        Some(match pager.alloc(size_bytes) {
            Ok(address) => Answer::Done(address),
            Err(error) => {
                member.note(format!("{size_bytes} bytes of the paged region '{tag}': {error}"));
                Answer::Refused(DriverCode::OUT_OF_MEMORY)
            }
        })
    }

    /// Frees the paged memory that begins at `address`: `settle` waits for the work that may still use it. `None`: it is no paged
    /// region's.
    #[doc(alias = "cuMemFree")]
    pub fn free(
        &self,
        member: &Member<D>,
        address: DeviceAddress,
        settle: impl FnOnce() -> DriverCode,
    ) -> Option<Answer<()>> {
        let pager = self.window_of(address)?;
        let span = pager.span_at(address);
        if span.is_none_or(|span| span.start != address) {
            return Some(Answer::Refused(DriverCode::INVALID_VALUE));
        }
        let entered = member.pool().enter_giving_up();
        let free = || match pager.free(address) {
            Ok(()) => Ok(()),
            Err(PageError::Pool(error)) => Err(error),
            Err(_) => Err(PoolError::NotOurs),
        };
        Some(match give_up(&entered, settle, free) {
            // Another thread has freed it meanwhile.
            Answer::AskDriver => Answer::Refused(DriverCode::INVALID_VALUE),
            answer @ (Answer::Done(()) | Answer::Refused(_)) => answer,
        })
    }

    /// What was allocated in a paged region and holds `address`.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_of(&self, address: DeviceAddress) -> Option<VaRange> {
        self.window_of(address)?.span_at(address)
    }
}

impl<D: Driver> Default for PagedRegions<D> {
    fn default() -> Self {
        Self::new()
    }
}
