//! The access rights of this process to its own pages, from `/proc/self/maps`.

use std::ops::Range;

/// The file that lists this process's mappings.
const MAPS: &str = "/proc/self/maps";

/// A page's rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rights {
    /// May be read.
    pub(super) read: bool,
    /// May be written.
    pub(super) write: bool,
    /// May be executed.
    pub(super) execute: bool,
}

/// All mappings at one moment, by address.
#[derive(Debug, Default)]
pub(super) struct Protections {
    mappings: Vec<(Range<usize>, Rights)>,
}

impl Protections {
    /// Reads the present mappings. Empty if the kernel does not report them: then nothing is known to be mapped.
    pub(super) fn read() -> Self {
        let lines = read_maps();
        let lines = lines.split(|&byte| byte == b'\n');
        Self { mappings: lines.filter_map(mapping_of).collect() }
    }

    /// Returns the rights of the page that contains `address`; `None` if nothing is mapped there.
    pub(super) fn at(&self, address: usize) -> Option<Rights> {
        let behind = self.mappings.partition_point(|(range, _)| range.start <= address);
        let (range, rights) = self.mappings.get(behind.checked_sub(1)?)?;
        range.contains(&address).then_some(*rights)
    }

    /// Returns the parts of `range` that may be read and written.
    pub(super) fn writable_in(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let first = self.mappings.partition_point(|(mapped, _)| mapped.end <= range.start);
        let inside = self.mappings[first..].iter();
        inside
            .take_while({
                let end = range.end;
                move |(mapped, _)| mapped.start < end
            })
            .filter(|(_, rights)| rights.read && rights.write)
            .map(move |(mapped, _)| mapped.start.max(range.start)..mapped.end.min(range.end))
    }
}

/// Reads the text of the list. File names in it are bytes, and need not be text. Empty if the kernel does not report it.
pub(super) fn read_maps() -> Vec<u8> {
    std::fs::read(MAPS).unwrap_or_default()
}

/// Parses a line such as `7f00-8f00 r-xp 00000000 08:01 123 /lib/a.so`.
pub(super) fn mapping_of(line: &[u8]) -> Option<(Range<usize>, Rights)> {
    let mut words = line.split(|&byte| byte == b' ');
    let range = std::str::from_utf8(words.next()?).ok()?;
    let (start, end) = range.split_once('-')?;
    let number = |digits| usize::from_str_radix(digits, 16).ok();
    let rights = words.next()?;
    let has = |place: usize, letter| rights.get(place) == Some(&letter);
    let rights = Rights { read: has(0, b'r'), write: has(1, b'w'), execute: has(2, b'x') };
    Some((number(start)?..number(end)?, rights))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage() -> Protections {
        let lines: [&[u8]; 4] = [
            b"1000-3000 r-xp 00000000 08:01 7 /lib/\xff.so",
            b"3000-4000 rw-p 00002000 08:01 7 /lib/a.so",
            b"6000-8000 rw-p 00000000 00:00 0",
            b"8000-9000 ---p 00000000 00:00 0",
        ];
        Protections { mappings: lines.into_iter().filter_map(mapping_of).collect() }
    }

    #[test]
    fn an_address_has_the_rights_of_its_mapping() {
        let stage = stage();
        assert_eq!(stage.at(0xfff), None);
        assert_eq!(stage.at(0x2fff), Some(Rights { read: true, write: false, execute: true }));
        assert_eq!(stage.at(0x3000), Some(Rights { read: true, write: true, execute: false }));
        assert_eq!(stage.at(0x4000), None);
        assert_eq!(stage.at(0x8fff), Some(Rights { read: false, write: false, execute: false }));
        assert_eq!(stage.at(0x9000), None);
    }

    #[test]
    fn only_what_may_be_written_is_writable() {
        let writable: Vec<_> = stage().writable_in(0x2800..0x8800).collect();
        assert_eq!(writable, [0x3000..0x4000, 0x6000..0x8000]);
        let inside: Vec<_> = stage().writable_in(0x6800..0x7000).collect();
        assert_eq!((inside.len(), &inside[0]), (1, &(0x6800..0x7000)));
        assert_eq!(stage().writable_in(0x4000..0x6000).count(), 0);
    }

    #[test]
    fn lines_that_are_none_are_skipped() {
        for line in ["", "x-y rwxp", "1000 rwxp", "1000-2000"] {
            assert_eq!(mapping_of(line.as_bytes()), None, "{line:?}");
        }
    }

    #[test]
    fn a_place_of_this_process_is_found() {
        let here = [0_u8; 1];
        let rights = Protections::read().at(here.as_ptr().addr());
        assert!(rights.is_some_and(|rights| rights.write), "{rights:?}");
    }
}
