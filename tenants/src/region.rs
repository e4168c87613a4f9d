//! Regions: memory that a thread asks for inside one belongs to the region's tag and policy.

use std::cell::RefCell;

use vmm_pool::{Class, Contents};

/// Deepest nesting; more is a leak of begins without ends.
pub const DEPTH_MAX: usize = 64;
/// Longest tag, in bytes.
pub const TAG_BYTES_MAX: usize = 128;

thread_local! {
    static REGIONS: RefCell<Vec<(String, Contents)>> = const { RefCell::new(Vec::new()) };
}

/// Why a region could not begin or end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The tag is empty or too long.
    #[error("a region's tag has 1 to {TAG_BYTES_MAX} bytes, not {length}")]
    BadTag {
        /// The length given.
        length: usize,
    },
    /// Nested too deep.
    #[error("regions are nested {DEPTH_MAX} deep: an end is missing on this thread")]
    TooDeep,
    /// No region is open on this thread.
    #[error("no region is open on this thread: end regions on the thread that began them")]
    NotOpen,
}

/// Begins a region on this thread, inside any that is open.
///
/// # Errors
/// [`RegionError::BadTag`], [`RegionError::TooDeep`].
pub fn begin(tag: &str, contents: Contents) -> Result<(), RegionError> {
    if tag.is_empty() || tag.len() > TAG_BYTES_MAX {
        return Err(RegionError::BadTag { length: tag.len() });
    }
    REGIONS.with_borrow_mut(|regions| {
        if regions.len() >= DEPTH_MAX {
            return Err(RegionError::TooDeep);
        }
        regions.push((tag.to_owned(), contents));
        Ok(())
    })
}

/// Ends the innermost region of this thread.
///
/// # Errors
/// [`RegionError::NotOpen`].
pub fn end() -> Result<(), RegionError> {
    REGIONS.with_borrow_mut(|regions| regions.pop().map(|_| ()).ok_or(RegionError::NotOpen))
}

/// The class of memory that `library` asks for on this thread now.
pub fn class_of(library: &'static str) -> Class {
    // During thread teardown there is no region any more.
    let open = REGIONS.try_with(|regions| regions.borrow().last().cloned()).ok().flatten();
    match open {
        Some((tag, contents)) => Class { library, tag, contents },
        None => Class { library, ..Class::default() },
    }
}
