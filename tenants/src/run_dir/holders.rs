//! Who holds a lock, as the kernel lists it.
//!
//! What holders write into the lock file themselves says less: of several that share it only one could, and one that
//! was killed leaves its number behind, which may be another's by now.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;

use nix::sys::stat::{major, minor};

/// Ids of the processes that hold a lock on `file`, in our pid namespace. None where the kernel lists none: it is
/// not allowed to say, or the holders live in another namespace, or have ended and left the lock to a child.
pub(super) fn holders(file: &File) -> Vec<u32> {
    let Ok(found) = file.metadata() else {
        return Vec::new();
    };
    let (device, inode) = (found.dev(), found.ino());
    let name = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    let list = fs::read_to_string("/proc/locks").unwrap_or_default();
    let mut pids: Vec<u32> = list.lines().filter_map(|line| holder_in(line, &name)).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// The process that a line of `/proc/locks` says holds a whole-file lock on the file `name`. Lines of processes that
/// wait have an arrow in the second place.
fn holder_in(line: &str, name: &str) -> Option<u32> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        [_, "FLOCK", _, _, pid, file, ..] if file == name => {
            pid.parse().ok().filter(|pid| *pid > 0)
        }
        _ => None,
    }
}

/// The holders for people.
pub(super) fn in_words(pids: &[u32]) -> String {
    let numbers: Vec<String> = pids.iter().map(ToString::to_string).collect();
    match numbers.as_slice() {
        [] => "a process of unknown id".to_owned(),
        [one] => format!("process {one}"),
        more => format!("processes {}", more.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_holders_of_the_file_are_read_from_the_list() {
        let name = "00:1a:77";
        assert_eq!(holder_in("3: FLOCK  ADVISORY  WRITE 41 00:1a:77 0 EOF", name), Some(41));
        assert_eq!(holder_in("3: FLOCK  ADVISORY  READ  42 00:1a:77 0 EOF", name), Some(42));
        for other in [
            "3: -> FLOCK  ADVISORY  WRITE 43 00:1a:77 0 EOF",
            "4: POSIX  ADVISORY  WRITE 44 00:1a:77 0 EOF",
            "5: FLOCK  ADVISORY  WRITE 45 00:1a:78 0 EOF",
            "6: FLOCK  ADVISORY  WRITE 0 00:1a:77 0 EOF",
            "7: FLOCK",
            "",
        ] {
            assert_eq!(holder_in(other, name), None, "{other}");
        }
    }

    #[test]
    fn one_several_and_unknown_holders_have_words() {
        assert_eq!(in_words(&[]), "a process of unknown id");
        assert_eq!(in_words(&[7]), "process 7");
        assert_eq!(in_words(&[7, 9]), "processes 7, 9");
    }
}
