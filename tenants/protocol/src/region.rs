//! Regions: memory that a thread allocates inside a region belongs to the region's tag and policy.
//!
//! A tag has one policy for the life of the process. All memory of one tag is released and restored together, and a reader of
//! the tag must know what happened to its contents.
//!
//! Libraries' own memory (NCCL's buffers, handles of cuBLAS) belongs to no tag, whatever region it is allocated in. Otherwise
//! it would be released under a library that knows nothing of tags.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::sync::lock;
use vmm_pool::{Class, Contents, LIBRARY_TAGS};

/// The deepest nesting; a deeper one means that ends of regions are missing.
pub const DEPTH_MAX: usize = 64;
/// Longest tag, in bytes.
pub const TAG_BYTES_MAX: usize = 128;
/// The most tags of a process; more means that the program makes a new tag for each use.
pub const TAGS_MAX: usize = 4096;

/// Labels of libraries whose own memory belongs to no region.
const UNTAGGED: [&str; 7] = ["nccl", "cublas", "cudnn", "cusparse", "cusolver", "cufft", "nvshmem"];

/// A stretch of a thread's work.
#[derive(Clone, Debug)]
struct Region {
    tag: String,
    contents: Contents,
    /// The device of the region. Memory on other devices belongs to no tag.
    device: Option<DeviceOrdinal>,
}

/// The region for a thread's memory while none of its own regions is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Base {
    /// The region for all threads, if there is one.
    #[default]
    Everywhere,
    /// No region: the memory belongs to no tag.
    NoTag,
    /// As if a region were open.
    Region {
        /// The tag of the region.
        tag: String,
        /// The tag's policy.
        contents: Contents,
    },
}

thread_local! {
    /// Open regions, the innermost last; `None` for a stretch in which no region counts.
    static REGIONS: RefCell<Vec<Option<Region>>> = const { RefCell::new(Vec::new()) };
    /// The region that counts while none is open.
    static BASE: RefCell<Base> = const { RefCell::new(Base::Everywhere) };
    /// Does a library allocate for its caller?
    static FOR_CALLER: Cell<bool> = const { Cell::new(false) };
}

/// The state of regions that all threads share.
#[derive(Debug)]
struct Regions {
    /// Every tag with which a region was ever begun.
    policies: BTreeMap<String, Contents>,
    /// The tags whose memory is paged: no pause by tag releases it.
    paged: BTreeSet<String>,
    /// The tags without whose memory the process has agreed to run.
    runs_without: BTreeSet<String>,
    /// The region for threads without a region of their own.
    everywhere: Option<Region>,
}

static SHARED: Mutex<Regions> = Mutex::new(Regions {
    policies: BTreeMap::new(),
    paged: BTreeSet::new(),
    runs_without: BTreeSet::new(),
    everywhere: None,
});

/// Why a region could not begin or end.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The tag of a region is empty or too long. The region was not begun. Give a shorter name.
    #[error("a region's tag has 1 to {TAG_BYTES_MAX} bytes, not {length}")]
    BadTag { length: usize },
    /// A tag has one policy as long as its process lives. The region was not begun. Use another tag for the other
    /// policy.
    #[error(
        "tag '{tag}' has the policy {was:?} in this process and cannot be {now:?} too: use another tag for \
         memory with another policy"
    )]
    OtherContents { tag: String, was: Contents, now: Contents },
    /// The tag `nccl` names the memory of NCCL itself. The region was not begun. Use another tag.
    #[error("tag '{tag}' is for {tag}'s own memory: use another tag")]
    LibrarysTag { tag: String },
    /// The process has used more tags than the limit. The region was not begun. Give tensors of one kind the same
    /// tag.
    #[error("this process has used {TAGS_MAX} tags: a tag names a kind of memory, not one tensor")]
    TooManyTags,
    /// More regions are open in one thread than the limit: an end is missing. The region was not begun.
    #[error("regions are nested {DEPTH_MAX} deep: an end is missing on this thread")]
    TooDeep,
    /// The thread ends a region that it has not begun. Nothing was changed. End each region in the thread that began
    /// it.
    #[error("no region is open on this thread: end regions on the thread that began them")]
    NotOpen,
    /// A region for all threads is open already, or none is.
    #[error("{0}")]
    Everywhere(&'static str),
}

/// Checks the tag, and fixes its policy at its first use.
fn region(
    tag: &str,
    contents: Contents,
    device: Option<DeviceOrdinal>,
) -> Result<Region, RegionError> {
    if tag.is_empty() || tag.len() > TAG_BYTES_MAX {
        return Err(RegionError::BadTag { length: tag.len() });
    }
    if LIBRARY_TAGS.contains(&tag) {
        return Err(RegionError::LibrarysTag { tag: tag.to_owned() });
    }
    let mut shared = lock(&SHARED);
    let tags = shared.policies.len();
    match shared.policies.get(tag) {
        Some(&was) if was != contents => {
            return Err(RegionError::OtherContents { tag: tag.to_owned(), was, now: contents });
        }
        Some(_) => {}
        None if tags >= TAGS_MAX => return Err(RegionError::TooManyTags),
        None => {
            shared.policies.insert(tag.to_owned(), contents);
        }
    }
    Ok(Region { tag: tag.to_owned(), contents, device })
}

/// Marks memory of this tag as paged from now on: it is released and restored on demand, and [`tags`] no longer lists the tag.
///
/// # Errors
/// [`RegionError::BadTag`], [`RegionError::OtherContents`], [`RegionError::LibrarysTag`], [`RegionError::TooManyTags`].
pub fn page(tag: &str) -> Result<(), RegionError> {
    let Region { tag, .. } = region(tag, Contents::Keep, None)?;
    lock(&SHARED).paged.insert(tag);
    Ok(())
}

/// Ends the paging of memory of this tag.
pub fn page_no_more(tag: &str) {
    lock(&SHARED).paged.remove(tag);
}

/// Records that the process runs on while memory of this tag is released, also by another's pause.
pub fn agree_to_run_without(tag: &str) {
    lock(&SHARED).runs_without.insert(tag.to_owned());
}

/// Does the process run on while memory of this tag is released, also by another's pause? Libraries ensure this for their own
/// memory.
pub fn runs_without(tag: &str) -> bool {
    LIBRARY_TAGS.contains(&tag) || lock(&SHARED).runs_without.contains(tag)
}

/// Begins a region on this thread, inside any that is open. If `device` is given, memory on other devices belongs to no tag.
///
/// # Errors
/// [`RegionError`], but for [`RegionError::NotOpen`].
pub fn begin(
    tag: &str,
    contents: Contents,
    device: Option<DeviceOrdinal>,
) -> Result<(), RegionError> {
    let region = region(tag, contents, device)?;
    push(Some(region))
}

/// Begins a stretch of this thread's work in which no region counts.
///
/// # Errors
/// [`RegionError::TooDeep`].
pub fn begin_none() -> Result<(), RegionError> {
    push(None)
}

fn push(region: Option<Region>) -> Result<(), RegionError> {
    REGIONS.with_borrow_mut(|regions| {
        if regions.len() >= DEPTH_MAX {
            return Err(RegionError::TooDeep);
        }
        regions.push(region);
        Ok(())
    })
}

/// Ends the region or stretch that was begun last on this thread.
///
/// # Errors
/// [`RegionError::NotOpen`].
pub fn end() -> Result<(), RegionError> {
    REGIONS.with_borrow_mut(|regions| regions.pop().map(|_| ()).ok_or(RegionError::NotOpen))
}

/// Sets the region for this thread's memory while no region is open, until the next call. For callers that set and reset one
/// state instead of opening and closing regions.
///
/// # Errors
/// [`RegionError::BadTag`], [`RegionError::OtherContents`], [`RegionError::TooManyTags`]; after an error the thread's memory
/// belongs to no tag.
pub fn set_base(base: Base) -> Result<(), RegionError> {
    let outcome = match &base {
        Base::Everywhere | Base::NoTag => Ok(()),
        Base::Region { tag, contents } => region(tag, *contents, None).map(drop),
    };
    BASE.replace(if outcome.is_ok() { base } else { Base::NoTag });
    outcome
}

/// Returns the region of this thread's memory while none of its own regions is open.
fn base_region() -> Option<Region> {
    match BASE.try_with(|base| base.borrow().clone()).unwrap_or_default() {
        Base::Everywhere => lock(&SHARED).everywhere.clone(),
        Base::NoTag => None,
        Base::Region { tag, contents } => Some(Region { tag, contents, device: None }),
    }
}

/// Begins a region for all threads that have none of their own open, such as a library's worker threads. Only one such region
/// is open at a time.
///
/// # Errors
/// [`RegionError`].
pub fn begin_everywhere(
    tag: &str,
    contents: Contents,
    device: Option<DeviceOrdinal>,
) -> Result<(), RegionError> {
    let region = region(tag, contents, device)?;
    let mut shared = lock(&SHARED);
    if let Some(open) = &shared.everywhere
        && open.tag != tag
    {
        let text = "a region for all threads is open: end it before another begins";
        return Err(RegionError::Everywhere(text));
    }
    shared.everywhere = Some(region);
    Ok(())
}

/// Ends the region for all threads.
///
/// # Errors
/// [`RegionError::Everywhere`] when there is none.
pub fn end_everywhere() -> Result<(), RegionError> {
    match lock(&SHARED).everywhere.take() {
        Some(_) => Ok(()),
        None => Err(RegionError::Everywhere("no region for all threads is open")),
    }
}

/// Every tag with which a region was ever begun, with its policy, except for those whose memory is paged.
pub fn tags() -> BTreeMap<String, Contents> {
    let shared = lock(&SHARED);
    let known = shared.policies.iter().filter(|(tag, _)| !shared.paged.contains(*tag));
    known.map(|(tag, contents)| (tag.clone(), *contents)).collect()
}

/// Makes a call by which a library allocates for its caller: that memory does not count as the library's own.
pub fn for_caller<T>(call: impl FnOnce() -> T) -> T {
    let before = FOR_CALLER.replace(true);
    let made = call();
    FOR_CALLER.set(before);
    made
}

/// The class of memory that `library` allocates on this thread now, on `device` if it is known.
pub fn class_of(library: &'static str, device: Option<DeviceOrdinal>) -> Class {
    let is_for_caller = FOR_CALLER.try_with(Cell::get).unwrap_or_default();
    if UNTAGGED.contains(&library) && !is_for_caller {
        let has_tag = LIBRARY_TAGS.contains(&library);
        let tag = if has_tag { library.to_owned() } else { String::new() };
        return Class { library, tag, ..Class::default() };
    }
    // During thread teardown there is no region any more.
    let own = REGIONS.try_with(|regions| regions.borrow().last().cloned()).ok().flatten();
    let open = own.unwrap_or_else(base_region);
    match open.filter(|region| region.device.is_none() || region.device == device) {
        Some(Region { tag, contents, .. }) => Class { library, tag, contents },
        None => Class { library, ..Class::default() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: DeviceOrdinal = DeviceOrdinal(0);

    fn tag_now(library: &'static str) -> String {
        class_of(library, Some(GPU)).tag
    }

    #[test]
    fn the_innermost_region_counts_and_libraries_own_memory_belongs_to_none() {
        begin("weights", Contents::Keep, None).unwrap();
        begin("cache", Contents::Discard, Some(GPU)).unwrap();
        assert_eq!(class_of("torch", Some(GPU)).contents, Contents::Discard);
        assert_eq!([tag_now("torch"), tag_now("cublas"), tag_now("nccl")], ["cache", "", "nccl"]);
        assert_eq!(class_of("nccl", Some(GPU)).contents, Contents::Keep);
        assert_eq!(class_of("torch", Some(DeviceOrdinal(1))).tag, "");
        begin_none().unwrap();
        assert_eq!(tag_now("torch"), "");
        end().unwrap();
        end().unwrap();
        assert_eq!(tag_now("torch"), "weights");
        end().unwrap();
        assert_eq!(end(), Err(RegionError::NotOpen));
    }

    #[test]
    fn what_a_library_allocates_for_its_caller_belongs_to_the_callers_region() {
        assert_eq!(for_caller(|| tag_now("nccl")), "");
        begin("window", Contents::Keep, None).unwrap();
        assert_eq!(for_caller(|| for_caller(|| tag_now("nccl"))), "window");
        assert_eq!(tag_now("nccl"), "nccl");
        end().unwrap();
    }

    #[test]
    fn a_librarys_tag_is_no_regions() {
        let error = begin("nccl", Contents::Keep, None).unwrap_err();
        assert!(
            error.to_string().contains("NCCL") || error.to_string().contains("nccl's own"),
            "{error}"
        );
        assert!(begin_everywhere("nccl", Contents::Keep, None).is_err());
        assert!(!tags().contains_key("nccl"));
    }

    #[test]
    fn a_tag_keeps_its_policy() {
        begin("fixed", Contents::Keep, None).unwrap();
        let error = begin("fixed", Contents::Discard, None).unwrap_err();
        assert!(error.to_string().contains("'fixed' has the policy Keep"), "{error}");
        end().unwrap();
        assert_eq!(tags().get("fixed"), Some(&Contents::Keep));
        assert_eq!(begin("", Contents::Keep, None), Err(RegionError::BadTag { length: 0 }));
    }

    #[test]
    fn a_region_for_all_threads_serves_those_without_one_of_their_own() {
        begin_everywhere("shared", Contents::Keep, None).unwrap();
        let other = std::thread::spawn(|| tag_now("torch")).join().unwrap();
        assert_eq!(other, "shared");
        let own = std::thread::spawn(|| {
            begin("own", Contents::Keep, None).unwrap();
            tag_now("torch")
        });
        assert_eq!(own.join().unwrap(), "own");
        assert!(begin_everywhere("another", Contents::Keep, None).is_err());
        end_everywhere().unwrap();
        assert!(end_everywhere().is_err());
        assert_eq!(std::thread::spawn(|| tag_now("torch")).join().unwrap(), "");
    }

    #[test]
    fn a_base_counts_where_no_region_is_open() {
        let base = |tag: &str| Base::Region { tag: tag.to_owned(), contents: Contents::Discard };
        set_base(base("state")).unwrap();
        assert_eq!(class_of("torch", Some(GPU)).contents, Contents::Discard);
        assert_eq!([tag_now("torch"), tag_now("nccl")], ["state", "nccl"]);
        begin("opened", Contents::Keep, None).unwrap();
        assert_eq!(tag_now("torch"), "opened");
        end().unwrap();
        assert_eq!(tag_now("torch"), "state");
        set_base(Base::NoTag).unwrap();
        assert_eq!(tag_now("torch"), "");
        set_base(base("state")).unwrap();
        assert_eq!(set_base(base("")), Err(RegionError::BadTag { length: 0 }));
        assert_eq!(tag_now("torch"), "");
        set_base(Base::Everywhere).unwrap();
    }
}
