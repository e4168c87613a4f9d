//! The settings of a thread, those of the environment, and the tags that follow from them.

use std::ffi::{CStr, CString};
use std::sync::atomic::AtomicBool;

use tenants::region::{self, Base};
use vmm_pool::Contents;

/// The beginning of all tags of this interface.
const PREFIX: &str = "tms/";

/// The kind of host memory that callers ask backups to lie in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// Pages that the driver has pinned.
    #[default]
    Pinned,
    /// Pages of a mapping.
    Mapped,
}

impl Backend {
    /// The kind of that name. Empty is the default.
    pub fn named(word: &str) -> Option<Self> {
        match word {
            "" | "pinned" => Some(Self::Pinned),
            "mmap" => Some(Self::Mapped),
            _ => None,
        }
    }

    /// Its name.
    pub fn text(self) -> &'static CStr {
        match self {
            Self::Pinned => c"pinned",
            Self::Mapped => c"mmap",
        }
    }
}

/// The settings that the environment makes.
#[derive(Debug)]
pub struct Environment {
    interesting: bool,
    cpu_backup: bool,
    disk_backup: bool,
    backend: Backend,
    /// Are backups to be kept after a resume? Changed by the interface.
    pub(crate) retains: AtomicBool,
}

impl Environment {
    /// As the values of variables say, which `value_of` knows by name. What cannot be understood goes to the log.
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
    /// Can what the thread asks for be paused by this interface?
    pub interesting: bool,
    /// Does a pause save it to host memory?
    pub cpu_backup: bool,
    /// Does a pause save it to a file?
    pub disk_backup: bool,
    /// The kind of host memory that backups are said to lie in.
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

    /// Sets the tag. It ends as a C string, so it holds no zero.
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

    /// Returns what counts for memory of the thread outside of regions.
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

/// The tag that memory of `tag` with this policy has.
fn tag_name(tag: &str, contents: Contents) -> String {
    let policy = match contents {
        Contents::Keep => "keep",
        Contents::Discard | Contents::DiscardByTag => "discard",
        Contents::File => "file",
    };
    format!("{PREFIX}{tag}/{policy}")
}

/// The tags with which memory of `tag` was ever allocated; of all tags if that is `None`.
pub fn tags_of(tag: Option<&str>) -> Vec<String> {
    region::tags().into_keys().filter(|name| is_of(name, tag)).collect()
}

/// Is `name` a tag of this interface, and one that stands for `tag`?
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
