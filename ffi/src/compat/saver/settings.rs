//! What each thread has set, what the environment sets, and the tags that follow from it.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use tenants::region::{self, Base};
use vmm_pool::Contents;

use crate::c_api::{self, last::fail_aloud};

/// What tags of this interface begin with.
const PREFIX: &str = "tms/";

/// What kind of host memory callers ask backups to lie in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Backend {
    #[default]
    Pinned,
    Mapped,
}

impl Backend {
    /// Empty is the default.
    pub(super) fn named(word: &str) -> Option<Self> {
        match word {
            "" | "pinned" => Some(Self::Pinned),
            "mmap" => Some(Self::Mapped),
            _ => None,
        }
    }

    pub(super) fn text(self) -> &'static CStr {
        match self {
            Self::Pinned => c"pinned",
            Self::Mapped => c"mmap",
        }
    }
}

/// What the environment says, read once.
#[derive(Debug)]
pub(super) struct Environment {
    interesting: bool,
    cpu_backup: bool,
    disk_backup: bool,
    backend: Backend,
    /// Changed by the interface.
    pub(super) retain: AtomicBool,
}

impl Environment {
    pub(super) fn get() -> &'static Self {
        static READ: LazyLock<Environment> = LazyLock::new(Environment::read);
        &READ
    }

    fn read() -> Self {
        let text = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let switch = |name: &str| match text(name).as_deref() {
            Some("1" | "true" | "TRUE" | "yes" | "YES") => true,
            None | Some("0" | "false" | "FALSE" | "no" | "NO") => false,
            Some(other) => {
                tracing::error!("{name} is '{other}': give 1, true or yes, or 0, false or no");
                false
            }
        };
        let backend = text("TMS_INIT_CPU_BACKUP_BACKEND").unwrap_or_default();
        Self {
            interesting: switch("TMS_INIT_ENABLE"),
            cpu_backup: switch("TMS_INIT_ENABLE_CPU_BACKUP"),
            disk_backup: switch("TMS_INIT_ENABLE_DISK_BACKUP"),
            backend: Backend::named(&backend).unwrap_or_else(|| {
                tracing::error!("TMS_INIT_CPU_BACKUP_BACKEND is '{backend}': use pinned or mmap");
                Backend::default()
            }),
            retain: AtomicBool::new(switch("TMS_RETAIN_CPU_BACKUP")),
        }
    }
}

/// What one thread has set.
#[derive(Debug)]
pub(super) struct Settings {
    tag: CString,
    pub(super) interesting: bool,
    pub(super) cpu_backup: bool,
    pub(super) disk_backup: bool,
    pub(super) backend: Backend,
}

impl Settings {
    fn new() -> Self {
        let environment = Environment::get();
        Self {
            tag: c"default".to_owned(),
            interesting: environment.interesting,
            cpu_backup: environment.cpu_backup,
            disk_backup: environment.disk_backup,
            backend: environment.backend,
        }
    }

    pub(super) fn set_tag(&mut self, tag: &str) {
        self.tag = CString::new(tag.replace('\0', " ")).unwrap_or_default();
    }

    pub(super) fn tag_text(&self) -> &CStr {
        &self.tag
    }

    fn contents(&self) -> Contents {
        match (self.cpu_backup, self.disk_backup) {
            (true, _) => Contents::Keep,
            (false, true) => Contents::File,
            (false, false) => Contents::Discard,
        }
    }
}

thread_local! {
    static SETTINGS: RefCell<Settings> = RefCell::new(Settings::new());
    /// Does what counts for this thread's memory still have to follow?
    static IS_CHANGED: Cell<bool> = const { Cell::new(true) };
}

/// Changes what this thread has set. Counts from its next allocation on: callers change one thing after another.
pub(super) fn change(set: impl FnOnce(&mut Settings)) {
    SETTINGS.with_borrow_mut(set);
    IS_CHANGED.set(true);
}

/// Reads what this thread has set.
pub(super) fn ask<T>(read: impl FnOnce(&Settings) -> T) -> T {
    SETTINGS.with_borrow(|own| read(own))
}

/// Can what this thread asks for be paused by this interface?
pub(super) fn is_interesting() -> bool {
    SETTINGS.try_with(|own| own.borrow().interesting).unwrap_or(false)
}

/// Has the thread's memory belong to what it has set.
pub(super) fn settle() {
    // During thread teardown nothing is set any more.
    if IS_CHANGED.try_with(Cell::take).unwrap_or(false) {
        let _gone = SETTINGS.try_with(|own| apply(&own.borrow()));
    }
}

fn apply(own: &Settings) {
    let base = if own.interesting {
        let contents = own.contents();
        Base::Region { tag: tag_name(&own.tag.to_string_lossy(), contents), contents }
    } else if Environment::get().interesting {
        Base::NoTag
    } else {
        Base::Everywhere
    };
    if let Err(error) = region::set_base(base) {
        fail_aloud(c_api::ARGUMENT, &format!("memory of this thread cannot be paused: {error}"));
    }
}

/// The tag that memory of `tag` with this policy has.
fn tag_name(tag: &str, contents: Contents) -> String {
    let policy = match contents {
        Contents::Keep => "keep",
        Contents::Discard => "discard",
        Contents::File => "file",
    };
    format!("{PREFIX}{tag}/{policy}")
}

/// The tags that memory of `tag` was ever asked for with; of all tags when that is `None`.
pub(super) fn tags_of(tag: Option<&str>) -> Vec<String> {
    let is_of = |name: &str| {
        let own = name.strip_prefix(PREFIX).and_then(|rest| rest.rsplit_once('/'));
        own.is_some_and(|(own, _)| tag.is_none_or(|tag| tag == own))
    };
    region::tags().into_keys().filter(|name| is_of(name)).collect()
}
