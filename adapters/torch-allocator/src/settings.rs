//! The settings of a thread, those of the environment, and the tags that result from them.

use std::ffi::{CStr, CString};
use std::sync::atomic::AtomicBool;

use tenants::region::{self, Base};
use vmm_pool::Contents;

/// The prefix of all tags of this interface.
const PREFIX: &str = "tms/";

/// The kind of host memory that callers request for backups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// Pages that the driver has pinned.
    #[default]
    Pinned,
    /// Pages of a mapping.
    Mapped,
}

impl Backend {
    /// Returns the kind with that name. The empty name is the default.
    pub fn named(word: &str) -> Option<Self> {
        match word {
            "" | "pinned" => Some(Self::Pinned),
            "mmap" => Some(Self::Mapped),
            _ => None,
        }
    }

    /// Returns the name of the kind.
    pub fn text(self) -> &'static CStr {
        match self {
            Self::Pinned => c"pinned",
            Self::Mapped => c"mmap",
        }
    }
}

/// The settings that come from the environment.
#[derive(Debug)]
pub struct Environment {
    interesting: bool,
    cpu_backup: bool,
    disk_backup: bool,
    backend: Backend,
    /// Are backups kept after a resume? The interface can change it.
    pub(crate) retains: AtomicBool,
}

impl Environment {
    /// Reads the settings from variables; `value_of` returns a variable's value by its name. Values that cannot be understood
    /// are logged.
    pub fn read(value_of: impl Fn(&str) -> Option<String>) -> Self {
        let text = |name: &str| value_of(name).filter(|value| !value.is_empty());
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
            retains: AtomicBool::new(switch("TMS_RETAIN_CPU_BACKUP")),
        }
    }
}

/// The settings that one thread has made.
#[derive(Debug)]
pub struct Settings {
    tag: CString,
    /// Can this interface pause the memory that the thread requests?
    pub interesting: bool,
    /// Does a pause save the memory to host memory?
    pub cpu_backup: bool,
    /// Does a pause save the memory to a file?
    pub disk_backup: bool,
    /// The kind of host memory that callers have requested for backups.
    pub backend: Backend,
}

impl Settings {
    /// Returns the settings that a thread begins with.
    pub fn new(environment: &Environment) -> Self {
        Self {
            tag: c"default".to_owned(),
            interesting: environment.interesting,
            cpu_backup: environment.cpu_backup,
            disk_backup: environment.disk_backup,
            backend: environment.backend,
        }
    }

    /// Sets the tag. It is also a C string, so zero bytes are replaced.
    pub fn set_tag(&mut self, tag: &str) {
        self.tag = CString::new(tag.replace('\0', " ")).unwrap_or_default();
    }

    /// The tag.
    pub fn tag_text(&self) -> &CStr {
        &self.tag
    }

    fn contents(&self) -> Contents {
        match (self.cpu_backup, self.disk_backup) {
            (true, _) => Contents::Keep,
            (false, true) => Contents::File,
            (false, false) => Contents::DiscardByTag,
        }
    }

    /// Returns the settings for memory of the thread outside of regions.
    pub fn base(&self, environment: &Environment) -> Base {
        if self.interesting {
            let contents = self.contents();
            Base::Region { tag: tag_name(&self.tag.to_string_lossy(), contents), contents }
        } else if environment.interesting {
            Base::NoTag
        } else {
            Base::Everywhere
        }
    }
}

/// Returns the tag of memory of `tag` with this policy.
fn tag_name(tag: &str, contents: Contents) -> String {
    let policy = match contents {
        Contents::Keep => "keep",
        Contents::Discard | Contents::DiscardByTag => "discard",
        Contents::File => "file",
    };
    format!("{PREFIX}{tag}/{policy}")
}

/// Returns the tags with which memory of `tag` was ever allocated; of all tags if `tag` is `None`.
pub fn tags_of(tag: Option<&str>) -> Vec<String> {
    region::tags().into_keys().filter(|name| is_of(name, tag)).collect()
}

/// Is `name` a tag of this interface that stands for `tag`?
fn is_of(name: &str, tag: Option<&str>) -> bool {
    let own = name.strip_prefix(PREFIX).and_then(|rest| rest.rsplit_once('/'));
    own.is_some_and(|(own, _)| tag.is_none_or(|tag| tag == own))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(set: &'static [(&str, &str)]) -> Environment {
        let value_of = |name: &str| {
            set.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned())
        };
        Environment::read(value_of)
    }

    #[test]
    fn thread_begins_as_the_environment_says() {
        let plain =
            environment(&[("TMS_INIT_ENABLE", "perhaps"), ("TMS_INIT_ENABLE_CPU_BACKUP", "")]);
        let own = Settings::new(&plain);
        assert_eq!((own.interesting, own.cpu_backup, own.backend), (false, false, Backend::Pinned));
        assert_eq!(own.base(&plain), Base::Everywhere);

        let told =
            environment(&[("TMS_INIT_ENABLE", "1"), ("TMS_INIT_CPU_BACKUP_BACKEND", "mmap")]);
        let mut own = Settings::new(&told);
        assert_eq!((own.interesting, own.backend), (true, Backend::Mapped));
        own.interesting = false;
        assert_eq!(own.base(&told), Base::NoTag);
    }

    #[test]
    fn each_policy_of_a_tag_is_a_tag_of_ours() {
        let environment = environment(&[("TMS_INIT_ENABLE", "yes")]);
        let mut own = Settings::new(&environment);
        own.set_tag("a/b");
        for (cpu_backup, disk_backup, name, contents) in [
            (false, false, "tms/a/b/discard", Contents::DiscardByTag),
            (false, true, "tms/a/b/file", Contents::File),
            (true, true, "tms/a/b/keep", Contents::Keep),
        ] {
            (own.cpu_backup, own.disk_backup) = (cpu_backup, disk_backup);
            assert_eq!(own.base(&environment), Base::Region { tag: name.to_owned(), contents });
            assert!(is_of(name, Some("a/b")) && is_of(name, None), "{name}");
            assert!(!is_of(name, Some("a")), "{name}");
        }
        assert!(!is_of("weights", None));
    }
}
