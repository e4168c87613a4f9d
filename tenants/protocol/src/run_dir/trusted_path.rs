//! Directories that no other user can enter, replace or redirect.
//!
//! A path is walked from the root down. Each component is opened without following links:
//!
//! * every directory above ours belongs to root or to us, and nobody else can write to it, unless it is
//!   sticky, as `/tmp` is; so nobody else can rename anything in it;
//! * a link on the way is followed only if root or we made it, and its target is walked in the same way;
//! * our own directory is no link, belongs to us, is closed to group and others, and is on a file system of this machine.
//!
//! After that, nobody but root and ourselves can change what the path means, and it may be used as a path:
//! Unix sockets are bound and connected by name only.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, mkdirat};
use nix::sys::statfs::fstatfs;
use nix::unistd::geteuid;

use super::error::INSPECTION;
use super::{RunDirError, io_error};

/// Links followed on one path; the kernel's own limit.
const LINKS_MAX: usize = 40;
/// The times that a directory is made which another process removes as empty before anything is in it.
const MADE_MAX: u32 = 100;
/// The user id that the kernel shows by default for a user that has none in our user namespace.
const OVERFLOW_UID_DEFAULT: u32 = 65534;

/// Makes sure that `path` is a directory that is ours alone; creates it, but not those above it.
///
/// # Errors
/// [`RunDirError::NotOurs`]; [`RunDirError::Io`].
pub fn ensure(path: &Path) -> Result<(), RunDirError> {
    let (above, name) = walk_above(path)?;
    let mut made = 0;
    loop {
        match mkdirat(&above, name.as_os_str(), Mode::S_IRWXU) {
            Ok(()) | Err(Errno::EEXIST) => made += 1,
            Err(errno) => return Err(io_error("creation", path)(errno.into())),
        }
        match check_own(&above, &name, path) {
            Err(RunDirError::Io { source, .. })
                if source.kind() == ErrorKind::NotFound && made < MADE_MAX => {}
            checked => return checked,
        }
    }
}

/// Checks that `path` is a directory that is ours alone.
///
/// # Errors
/// As [`ensure`].
pub fn check(path: &Path) -> Result<(), RunDirError> {
    let (above, name) = walk_above(path)?;
    check_own(&above, &name, path)
}

/// Checks that no other user can replace `path`, or a directory above it.
///
/// # Errors
/// [`RunDirError`].
pub fn check_above_all(path: &Path) -> Result<(), RunDirError> {
    walk_above(path).map(drop)
}

/// Opens the directory above `path`, checked from the root down, and returns it with the name of `path` in it.
fn walk_above(path: &Path) -> Result<(OwnedFd, OsString), RunDirError> {
    let invalid = || io_error("use", path)(ErrorKind::InvalidInput.into());
    let whole = std::path::absolute(path).map_err(io_error("use", path))?;
    let name = whole.file_name().ok_or_else(invalid)?.to_owned();
    let mut pending = components(whole.parent().ok_or_else(invalid)?);
    let mut place = PathBuf::from("/");
    let mut here = open(&AT_FDCWD, OsStr::new("/"), &place)?;
    check_above(&status(&here, &place)?, &place)?;
    let mut links = 0;
    while let Some(next) = pending.pop_front() {
        let target = place.join(&next);
        let found = open(&here, &next, &target)?;
        let found_status = status(&found, &target)?;
        if kind(&found_status) != SFlag::S_IFLNK {
            check_above(&found_status, &target)?;
            (here, place) = (found, target);
            continue;
        }
        check_link(&found_status, &target)?;
        links += 1;
        if links > LINKS_MAX {
            return Err(io_error("use", path)(Errno::ELOOP.into()));
        }
        // Of the link that was just checked, whatever has its name by now.
        let leads_to = readlinkat(&found, "")
            .map_err(|errno| io_error("reading", &target)(errno.into()))
            .map(PathBuf::from)?;
        if leads_to.is_absolute() {
            place = PathBuf::from("/");
            here = open(&AT_FDCWD, OsStr::new("/"), &place)?;
        }
        for component in components(&leads_to).into_iter().rev() {
            pending.push_front(component);
        }
    }
    Ok((here, name))
}

/// Returns the components of a path that are to be walked. `..` leads up from wherever the walk is, which has been
/// checked.
fn components(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter(|component| matches!(component, Component::Normal(_) | Component::ParentDir))
        .map(|component| component.as_os_str().to_owned())
        .collect()
}

fn open(at: &impl AsFd, name: &OsStr, shown: &Path) -> Result<OwnedFd, RunDirError> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(at, name, flags, Mode::empty())
        .map_err(|errno| io_error(INSPECTION, shown)(errno.into()))
}

fn status(fd: &OwnedFd, shown: &Path) -> Result<FileStat, RunDirError> {
    fstat(fd).map_err(|errno| io_error(INSPECTION, shown)(errno.into()))
}

fn kind(status: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits())
}

fn refuse<T>(path: &Path, problem: String, next_step: String) -> Result<T, RunDirError> {
    Err(RunDirError::NotOurs { path: path.to_owned(), problem, next_step })
}

/// Checks a directory above ours: no other user may be able to replace its entries.
fn check_above(status: &FileStat, path: &Path) -> Result<(), RunDirError> {
    if kind(status) != SFlag::S_IFDIR {
        return Err(io_error("use", path)(Errno::ENOTDIR.into()));
    }
    let shown = path.display();
    if !is_trusted(status.st_uid) {
        return refuse(
            path,
            format!("belongs to user {}, who could replace what lies in it", status.st_uid),
            "choose a place under directories that belong to root or to you".to_owned(),
        );
    }
    let open_to_others = status.st_mode & 0o022 != 0;
    if open_to_others && status.st_mode & libc::S_ISVTX == 0 {
        return refuse(
            path,
            format!(
                "lets others replace what lies in it (mode {:03o}, not sticky)",
                status.st_mode & 0o777
            ),
            format!("chmod go-w {shown}"),
        );
    }
    Ok(())
}

fn check_link(status: &FileStat, path: &Path) -> Result<(), RunDirError> {
    if is_trusted(status.st_uid) {
        return Ok(());
    }
    refuse(
        path,
        format!("is a symbolic link of user {}", status.st_uid),
        format!("remove {}", path.display()),
    )
}

/// Checks our own directory itself.
fn check_own(above: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), RunDirError> {
    let found = open(above, name, path)?;
    let status = status(&found, path)?;
    let shown = path.display();
    let kind = kind(&status);
    if kind == SFlag::S_IFLNK {
        return refuse(path, "is a symbolic link".to_owned(), format!("remove {shown}"));
    }
    if kind != SFlag::S_IFDIR {
        return refuse(path, "is not a directory".to_owned(), format!("remove {shown}"));
    }
    let own_uid = geteuid().as_raw();
    if status.st_uid != own_uid {
        return refuse(
            path,
            format!("belongs to user {}, not {own_uid}", status.st_uid),
            format!(
                "run all processes of a tenant as user {}, or have that user or root remove {shown}",
                status.st_uid
            ),
        );
    }
    if unmapped_uid() == Some(own_uid) {
        return refuse(
            path,
            format!("may be anybody's: user {own_uid} stands for all that have no name here"),
            "give this process's user a name in its user namespace (unshare --map-current-user)"
                .to_owned(),
        );
    }
    let mode = status.st_mode & 0o777;
    if mode & 0o077 != 0 {
        return refuse(
            path,
            format!("is open to others (mode {mode:03o})"),
            format!("chmod 700 {shown}"),
        );
    }
    let system = fstatfs(&found)
        .map_err(|errno| io_error(INSPECTION, path)(errno.into()))?
        .filesystem_type();
    if let Some(system) = network_name(system.0) {
        return refuse(
            path,
            format!(
                "is on a network file system ({system}): on another machine that has it, our processes' sockets \
                 look like those of dead ones, and are removed"
            ),
            "use a directory of this machine's own".to_owned(),
        );
    }
    Ok(())
}

/// The name of a file system that several machines may see, by its number (`statfs(2)`). FUSE counts as local, since virtual
/// machines and containers have their disks by it.
fn network_name(number: i64) -> Option<&'static str> {
    // The kernel gives 32 bits; where they are signed, the upper ones follow the sign.
    match number & 0xffff_ffff {
        0x6969 => Some("NFS"),
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => Some("SMB"),
        0x0bd0_0bd0 => Some("Lustre"),
        0x00c3_6400 => Some("Ceph"),
        0x4750_4653 => Some("GPFS"),
        0x1983_0326 => Some("BeeGFS"),
        0x5346_414f | 0x6b41_4653 => Some("AFS"),
        0xaad7_aaea => Some("PanFS"),
        0x0116_1970 => Some("GFS2"),
        0x7461_636f => Some("OCFS2"),
        0x7375_7245 => Some("Coda"),
        _ => None,
    }
}

/// Is this user trusted? Root and our own user are. In a user namespace so are the users outside it, which cannot be told
/// apart: there root's directories look like theirs.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw() || unmapped_uid() == Some(uid)
}

/// The number that stands for users without a name in our user namespace; none if all users have a name.
fn unmapped_uid() -> Option<u32> {
    let read = |path| fs::read_to_string(path).ok();
    let overflow = read("/proc/sys/kernel/overflowuid")
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(OVERFLOW_UID_DEFAULT);
    let is_mapped = read("/proc/self/uid_map").is_none_or(|map| maps(&map, overflow));
    (!is_mapped).then_some(overflow)
}

/// Does a user namespace's `map` (lines of first inside, first outside, count) name `uid`?
fn maps(map: &str, uid: u32) -> bool {
    map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
        let [first, _outside, count] = numbers[..] else {
            return false;
        };
        (first..first.saturating_add(count)).contains(&u64::from(uid))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_that_others_remove_as_empty_is_made_again() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("train");
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    fs::remove_dir(&path).ok();
                }
            });
            let refused = (0..2000).find_map(|_| ensure(&path).err());
            is_over.store(true, Ordering::Relaxed);
            assert!(refused.is_none(), "{refused:?}");
        });
    }

    #[test]
    fn a_directory_above_that_others_write_to_is_refused_unless_it_is_sticky() {
        let base = tempfile::tempdir().unwrap();
        let above = base.path().join("above");
        fs::create_dir(&above).unwrap();
        let run = above.join("run");
        for mode in [0o777, 0o770, 0o702] {
            chmod(&above, mode);
            let text = ensure(&run).unwrap_err().to_string();
            assert!(text.contains("lets others replace what lies in it"), "{text}");
            assert!(text.contains("chmod go-w"), "{text}");
            assert!(!run.exists(), "created in a place of others");
        }
        for mode in [0o1777, 0o755] {
            chmod(&above, mode);
            ensure(&run).unwrap();
        }
        chmod(&above, 0o777);
        check(&run).unwrap_err();
        chmod(&above, 0o755);
        check(&run).unwrap();
    }

    #[test]
    fn links_of_ours_are_followed_and_what_they_lead_to_is_checked() {
        let base = tempfile::tempdir().unwrap();
        let real = base.path().join("real");
        fs::create_dir(&real).unwrap();
        symlink("real", base.path().join("relative")).unwrap();
        symlink(&real, base.path().join("absolute")).unwrap();
        symlink("../real/../real", real.join("up")).unwrap();
        for way in ["relative/a", "absolute/b", "real/up/c", "real/../real/d"] {
            ensure(&base.path().join(way)).unwrap();
        }
        for name in ["a", "b", "c", "d"] {
            assert!(real.join(name).is_dir(), "{name}");
        }
        chmod(&real, 0o777);
        for way in ["relative/a", "absolute/b"] {
            check(&base.path().join(way)).unwrap_err();
        }
    }

    #[test]
    fn links_in_a_ring_and_files_on_the_way_are_errors() {
        let base = tempfile::tempdir().unwrap();
        symlink("two", base.path().join("one")).unwrap();
        symlink("one", base.path().join("two")).unwrap();
        let error = ensure(&base.path().join("one/run")).unwrap_err();
        let RunDirError::Io { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.raw_os_error(), Some(libc::ELOOP));

        fs::write(base.path().join("file"), "").unwrap();
        let error = ensure(&base.path().join("file/run")).unwrap_err();
        let RunDirError::Io { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.kind(), ErrorKind::NotADirectory);
    }

    #[test]
    fn what_is_not_there_is_said_to_be_not_there() {
        let base = tempfile::tempdir().unwrap();
        for path in ["run", "above/run"] {
            let error = check(&base.path().join(path)).unwrap_err();
            let RunDirError::Io { source, .. } = &error else { panic!("{error}") };
            assert_eq!(source.kind(), ErrorKind::NotFound);
        }
        ensure(&base.path().join("above/run")).unwrap_err();
        ensure(Path::new("/")).unwrap_err();
    }

    #[test]
    fn file_systems_that_other_machines_see_are_known_by_their_numbers() {
        for (number, name) in [(0x6969, "NFS"), (0xff53_4d42, "SMB"), (0x0bd0_0bd0, "Lustre")] {
            assert_eq!(network_name(number), Some(name));
        }
        assert_eq!(network_name(i64::from(0xff53_4d42_u32.cast_signed())), Some("SMB"));
        // tmpfs, ext4, xfs, btrfs, overlayfs, FUSE.
        for local in [0x0102_1994, 0xef53, 0x5846_5342, 0x9123_683e, 0x794c_7630, 0x6573_5546] {
            assert_eq!(network_name(local), None, "{local:x}");
        }
        let base = tempfile::tempdir().unwrap();
        ensure(&base.path().join("run")).unwrap();
    }

    #[test]
    fn users_that_a_namespace_names_are_found_in_its_map() {
        let all = "         0          0 4294967295\n";
        assert!(maps(all, 0) && maps(all, 65534));
        let one = "      1000          0          1\n         0     100000      65534\n";
        assert!(maps(one, 1000) && maps(one, 65533) && !maps(one, 65534));
        assert!(!maps("", 0) && !maps("nonsense\n1 2\n", 1));
    }
}
