//! One library as the loader has it in memory: its segments, and what it imports by name.
//!
//! Sizes and offsets in an image are whatever its maker wrote. Every range is checked to lie inside one
//! segment that the loader mapped readable, so that a malformed image yields nothing instead of a fault.
//! The structures are those of the `object` crate; addresses are used as they lie in memory, not as in the
//! file.

#![expect(unsafe_code, reason = "reads the images of loaded libraries")]

use std::ffi::CStr;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use object::LittleEndian;
use object::elf::{
    DT_JMPREL, DT_NULL, DT_PLTREL, DT_PLTRELSZ, DT_RELA, DT_RELASZ, DT_STRSZ, DT_STRTAB, DT_SYMTAB,
    Dyn64, PF_R, PF_W, PT_DYNAMIC, PT_GNU_RELRO, PT_LOAD, R_X86_64_64, R_X86_64_GLOB_DAT,
    R_X86_64_JUMP_SLOT, Rela64, SHN_UNDEF, STB_WEAK, Sym64,
};

/// Files of this byte order only: the crate is for x86-64.
const ORDER: LittleEndian = LittleEndian;
/// The kernel's page size on x86-64.
pub(super) const PAGE_BYTES: usize = 4096;

type Rela = Rela64<LittleEndian>;

/// Part of an image that the loader mapped.
#[derive(Clone, Debug)]
struct Segment {
    range: Range<usize>,
    flags: u32,
}

/// A loaded library, while the loader keeps its list of libraries unchanged.
///
/// # Invariants
/// Every segment is mapped for `'walk`.
#[derive(Debug)]
pub(super) struct Object<'walk> {
    /// As the loader names it; empty for the program itself.
    pub(super) name: &'walk CStr,
    /// What is added to addresses of the file.
    pub(super) bias: usize,
    segments: Vec<Segment>,
    relro: Range<usize>,
    dynamic: Range<usize>,
    mapped: PhantomData<&'walk ()>,
}

/// Which of an object's relocations: its table, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Of functions that are called (`DT_JMPREL`).
    Calls(usize),
    /// Of everything else (`DT_RELA`).
    Data(usize),
}

/// A pointer that the loader fills with the address of another library's function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Import<'walk> {
    /// Where the pointer is.
    pub(super) slot: usize,
    /// The function's name.
    pub(super) name: &'walk CStr,
    /// May stay null when nobody has the function.
    pub(super) is_weak: bool,
}

/// The tables of an object that name its imports.
#[derive(Debug)]
pub(super) struct Imports<'walk> {
    calls: &'walk [Rela],
    data: &'walk [Rela],
    symbols: usize,
    names: &'walk [u8],
}

impl<'walk> Object<'walk> {
    /// What the loader tells of a library.
    ///
    /// # Safety
    /// `info` is the argument of a callback of `dl_iterate_phdr`, and `'walk` ends with that callback. The
    /// loader's list of libraries is locked until then, and no library is unmapped.
    pub(super) unsafe fn of_loader(info: &'walk libc::dl_phdr_info) -> Option<Self> {
        if info.dlpi_phdr.is_null() {
            return None;
        }
        let count = usize::from(info.dlpi_phnum);
        // SAFETY: the loader gives this many headers, which live as long as the library.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count) };
        let name = if info.dlpi_name.is_null() {
            c""
        } else {
            // SAFETY: the loader's names are terminated and live as long as the library.
            unsafe { CStr::from_ptr(info.dlpi_name) }
        };
        let bias = usize::try_from(info.dlpi_addr).ok()?;
        let place = |header: &libc::Elf64_Phdr| {
            let start = bias.wrapping_add(usize::try_from(header.p_vaddr).ok()?);
            let end = start.checked_add(usize::try_from(header.p_memsz).ok()?)?;
            Some(start..end)
        };
        let of_kind = |kind| headers.iter().filter(move |header| header.p_type == kind);
        let segments = of_kind(PT_LOAD)
            .filter_map(|header| Some(Segment { range: place(header)?, flags: header.p_flags }))
            .collect();
        // The loader protects whole pages only: what is behind the last whole one stays writable.
        let page = |address: usize| address & !(PAGE_BYTES - 1);
        let relro = of_kind(PT_GNU_RELRO).find_map(place).unwrap_or_default();
        let relro = page(relro.start)..page(relro.end);
        let dynamic = of_kind(PT_DYNAMIC).find_map(place)?;
        Some(Self { name, bias, segments, relro, dynamic, mapped: PhantomData })
    }

    /// Does it hold `address`?
    pub(super) fn contains(&self, address: usize) -> bool {
        self.segments.iter().any(|segment| segment.range.contains(&address))
    }

    /// Is `value` an address of the file, to which the bias has not been added yet?
    pub(super) fn is_unrelocated(&self, value: usize) -> bool {
        self.bias != 0 && !self.contains(value) && self.contains(self.bias.wrapping_add(value))
    }

    /// Does the loader make the page of `address` read-only once it has relocated the object?
    pub(super) fn is_in_relro(&self, address: usize) -> bool {
        self.relro.contains(&address)
    }

    /// Where it keeps data that it may change at any time.
    pub(super) fn data(&self) -> impl Iterator<Item = Range<usize>> {
        let writable = |segment: &&Segment| segment.flags & (PF_R | PF_W) == PF_R | PF_W;
        self.segments.iter().filter(writable).flat_map(|segment| {
            let range = segment.range.clone();
            let before = range.start..self.relro.start.clamp(range.start, range.end);
            let behind = self.relro.end.clamp(range.start, range.end)..range.end;
            // Where there is no such part, all is behind it.
            if self.relro.is_empty() { [range, 0..0] } else { [before, behind] }
        })
    }

    /// A word of its data, as other threads may change it.
    pub(super) fn word(&self, address: usize) -> Option<&'walk AtomicUsize> {
        let end = address.checked_add(size_of::<usize>())?;
        if !address.is_multiple_of(align_of::<AtomicUsize>()) || !self.is_readable(address..end) {
            return None;
        }
        let word = std::ptr::with_exposed_provenance::<AtomicUsize>(address);
        // SAFETY: aligned, and inside a segment, which is mapped for 'walk by the invariant; everybody else
        // who changes it is the loader or the library itself, by whole words.
        unsafe { word.as_ref() }
    }

    fn is_readable(&self, range: Range<usize>) -> bool {
        self.segments.iter().any(|segment| {
            segment.flags & PF_R != 0
                && segment.range.start <= range.start
                && range.end <= segment.range.end
        })
    }

    /// `bytes` bytes of a part that nobody changes after the loader has mapped it.
    fn constant(&self, address: usize, bytes: usize) -> Option<&'walk [u8]> {
        if address == 0 || !self.is_readable(address..address.checked_add(bytes)?) {
            return None;
        }
        let start = std::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: inside a segment, which is mapped for 'walk by the invariant; callers ask for the tables of
        // symbols and relocations only, which nobody writes to.
        Some(unsafe { std::slice::from_raw_parts(start, bytes) })
    }

    /// An address in the dynamic section, to which most loaders have added the bias and some have not.
    fn resolve(&self, value: usize) -> Option<usize> {
        let biased = self.bias.wrapping_add(value);
        [value, biased].into_iter().find(|&address| self.contains(address))
    }

    /// The tables of what it imports; `None` when it has none, or they are malformed.
    pub(super) fn imports(&self) -> Option<Imports<'walk>> {
        let bytes = self.dynamic.end - self.dynamic.start;
        let section = self.constant(self.dynamic.start, bytes)?;
        let count = bytes / size_of::<Dyn64<LittleEndian>>();
        let (entries, _) = object::slice_from_bytes::<Dyn64<LittleEndian>>(section, count).ok()?;
        let value = |wanted: i64| {
            let used = entries.iter().take_while(|entry| entry.d_tag.get(ORDER) != DT_NULL);
            let found = used.into_iter().find(|entry| entry.d_tag.get(ORDER) == wanted)?;
            usize::try_from(found.d_val.get(ORDER)).ok()
        };
        let table = |start: i64, bytes: i64| -> Option<&'walk [Rela]> {
            let (Some(start), Some(bytes)) = (value(start), value(bytes)) else {
                return Some(&[]);
            };
            let bytes = bytes - bytes % size_of::<Rela>();
            let found = self.constant(self.resolve(start)?, bytes)?;
            object::slice_from_all_bytes(found).ok()
        };
        let is_rela = value(DT_PLTREL).is_none_or(|kind| i64::try_from(kind) == Ok(DT_RELA));
        let calls = if is_rela { table(DT_JMPREL, DT_PLTRELSZ)? } else { &[] };
        let names = self.constant(self.resolve(value(DT_STRTAB)?)?, value(DT_STRSZ)?)?;
        let symbols = self.resolve(value(DT_SYMTAB)?)?;
        Some(Imports { calls, data: table(DT_RELA, DT_RELASZ)?, symbols, names })
    }

    /// The import at `place`; `None` where the relocation there is of another kind, or malformed.
    pub(super) fn import_at(
        &self,
        imports: &Imports<'walk>,
        place: Place,
    ) -> Option<Import<'walk>> {
        let relocation = match place {
            Place::Calls(number) => imports.calls.get(number),
            Place::Data(number) => imports.data.get(number),
        }?;
        let is_pointer = match relocation.r_type(ORDER, false) {
            R_X86_64_JUMP_SLOT | R_X86_64_GLOB_DAT => true,
            R_X86_64_64 => relocation.r_addend.get(ORDER) == 0,
            _ => false,
        };
        if !is_pointer {
            return None;
        }
        let number = usize::try_from(relocation.r_sym(ORDER, false)).ok()?;
        let offset = number.checked_mul(size_of::<Sym64<LittleEndian>>())?;
        let address = imports.symbols.checked_add(offset)?;
        let bytes = self.constant(address, size_of::<Sym64<LittleEndian>>())?;
        let (symbol, _) = object::from_bytes::<Sym64<LittleEndian>>(bytes).ok()?;
        // What it has itself is no import: an interposer's calls of its own functions stay its own.
        if number == 0 || symbol.st_shndx.get(ORDER) != SHN_UNDEF {
            return None;
        }
        let name = imports.names.get(usize::try_from(symbol.st_name.get(ORDER)).ok()?..)?;
        let slot = self.bias.wrapping_add(usize::try_from(relocation.r_offset.get(ORDER)).ok()?);
        let is_weak = symbol.st_bind() == STB_WEAK;
        Some(Import { slot, name: CStr::from_bytes_until_nul(name).ok()?, is_weak })
    }
}

impl Imports<'_> {
    /// Where imports may be.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> + use<> {
        let (calls, data) = self.sizes();
        (0..calls).map(Place::Calls).chain((0..data).map(Place::Data))
    }

    /// How many relocations there are, of calls and of everything else.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.calls.len(), self.data.len())
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "an image of a test is small")]
mod tests {
    use object::elf::{DT_HASH, PF_X, PT_NOTE};

    use super::*;

    const DYNAMIC: usize = 0x100;
    const SYMBOLS: usize = 0x400;
    const NAMES: usize = 0x600;
    const RELOCATIONS: usize = 0x800;
    const SLOTS: usize = 0x1000;
    const IMAGE_BYTES: usize = 0x2000;
    const TEXT: &[u8] = b"\0dlsym\0cuMemAlloc_v2\0weak\0own\0";

    /// A library in a buffer: one segment, two relocations of calls and two of data.
    struct Image {
        words: Vec<u64>,
        headers: Vec<libc::Elf64_Phdr>,
    }

    fn header(kind: u32, flags: u32, start: usize, bytes: usize) -> libc::Elf64_Phdr {
        libc::Elf64_Phdr {
            p_type: kind,
            p_flags: flags,
            p_offset: start as u64,
            p_vaddr: start as u64,
            p_paddr: 0,
            p_filesz: bytes as u64,
            p_memsz: bytes as u64,
            p_align: 8,
        }
    }

    impl Image {
        fn new() -> Self {
            let mut image = Self { words: vec![0; IMAGE_BYTES / 8], headers: Vec::new() };
            image.headers = vec![
                header(PT_NOTE, PF_R, 0, 8),
                header(PT_LOAD, PF_R | PF_W | PF_X, 0, IMAGE_BYTES),
                header(PT_DYNAMIC, PF_R, DYNAMIC, 0x200),
            ];
            let relocation = size_of::<Rela>() as u64;
            let entries = [
                (DT_HASH, 0),
                (DT_JMPREL, RELOCATIONS as u64),
                (DT_PLTRELSZ, 2 * relocation),
                (DT_PLTREL, DT_RELA.cast_unsigned()),
                (DT_RELA, RELOCATIONS as u64 + 2 * relocation),
                (DT_RELASZ, 2 * relocation),
                (DT_STRTAB, NAMES as u64),
                (DT_STRSZ, TEXT.len() as u64),
                (DT_SYMTAB, SYMBOLS as u64),
                (DT_NULL, 0),
            ];
            for (number, (tag, value)) in entries.into_iter().enumerate() {
                image.put(DYNAMIC + 16 * number, &[tag.cast_unsigned(), value]);
            }
            // Name, binding and section are in the first word of a symbol: 1 is global, 2 weak.
            let symbols = [(1, 1, 0), (7, 1, 0), (21, 2, 0), (26, 1, 5)];
            for (number, (name, binding, section)) in symbols.into_iter().enumerate() {
                let word = name | binding << 36 | section << 48;
                image.put(SYMBOLS + 24 * (number + 1), &[word, 0, 0]);
            }
            let kinds = [R_X86_64_JUMP_SLOT, R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64];
            let symbols = [1, 4, 3, 2];
            for (number, (kind, symbol)) in kinds.into_iter().zip(symbols).enumerate() {
                let info = symbol << 32 | u64::from(kind);
                image.put(RELOCATIONS + 24 * number, &[(SLOTS + 8 * number) as u64, info, 0]);
            }
            let mut names = TEXT.to_vec();
            names.resize(TEXT.len().next_multiple_of(8), 0);
            let words = names.chunks_exact(8).filter_map(|word| word.try_into().ok());
            let words: Vec<u64> = words.map(u64::from_le_bytes).collect();
            image.put(NAMES, &words);
            image
        }

        fn put(&mut self, at: usize, words: &[u64]) {
            self.words[at / 8..at / 8 + words.len()].copy_from_slice(words);
        }

        fn bias(&self) -> usize {
            self.words.as_ptr().expose_provenance()
        }

        fn info(&self) -> libc::dl_phdr_info {
            // SAFETY: the structure is plain numbers and pointers, all of which may be zero.
            let mut info: libc::dl_phdr_info = unsafe { std::mem::zeroed() };
            info.dlpi_addr = self.bias() as u64;
            info.dlpi_phdr = self.headers.as_ptr();
            info.dlpi_phnum = self.headers.len() as u16;
            info
        }

        /// Names of what it imports, with the places of their slots.
        fn imports(&self) -> Option<Vec<(String, usize, bool)>> {
            let info = self.info();
            // SAFETY: the segment is this image's buffer, which outlives the object.
            let object = unsafe { Object::of_loader(&info) }?;
            let imports = object.imports()?;
            let found = imports.places().filter_map(|place| object.import_at(&imports, place));
            let found = found.map(|import| {
                // What is told of a slot must be safe to ask.
                let _word = object
                    .word(import.slot)
                    .map(|word| word.load(std::sync::atomic::Ordering::Relaxed));
                let name = import.name.to_string_lossy().into_owned();
                (name, import.slot.wrapping_sub(object.bias), import.is_weak)
            });
            Some(found.collect())
        }
    }

    #[test]
    fn imports_are_what_others_have() {
        let found = Image::new().imports();
        let wanted = [
            ("dlsym".to_owned(), SLOTS, false),
            ("weak".to_owned(), SLOTS + 16, true),
            ("cuMemAlloc_v2".to_owned(), SLOTS + 24, false),
        ];
        assert_eq!(found.as_deref(), Some(&wanted[..]), "not what it has itself");
    }

    #[test]
    fn addresses_that_the_loader_has_relocated_are_found_too() {
        let mut image = Image::new();
        let bias = image.bias() as u64;
        for number in [1, 4, 6, 8] {
            image.words[(DYNAMIC + 16 * number + 8) / 8] += bias;
        }
        assert_eq!(image.imports(), Image::new().imports());
    }

    #[test]
    fn addresses_of_the_file_are_known_from_those_of_memory() {
        let image = Image::new();
        let info = image.info();
        // SAFETY: the segment is this image's buffer, which outlives the object.
        let object = unsafe { Object::of_loader(&info) }.expect("an object");
        assert!(object.is_unrelocated(0x1036));
        assert!(!object.is_unrelocated(image.bias() + 0x1036));
        assert!(!object.is_unrelocated(IMAGE_BYTES));
        assert!(object.word(image.bias() + 4).is_none(), "not aligned");
        assert!(object.word(image.bias() + IMAGE_BYTES).is_none(), "behind its end");
    }

    #[test]
    fn an_image_without_tables_has_no_imports() {
        let mut image = Image::new();
        image.headers.truncate(2);
        assert_eq!(image.imports(), None);
        let mut image = Image::new();
        image.put(DYNAMIC, &[DT_NULL.cast_unsigned(), 0]);
        assert_eq!(image.imports(), None);
        image.headers.clear();
        assert_eq!(image.imports(), None);
    }

    #[test]
    fn malformed_images_are_read_without_a_fault() {
        let mut random = fastrand::Rng::with_seed(20);
        let (mut none, mut some) = (0, 0);
        for _ in 0..20_000 {
            let mut image = Image::new();
            for _ in 0..random.usize(1..6) {
                let parts = [
                    DYNAMIC..DYNAMIC + 160,
                    SYMBOLS..SYMBOLS + 120,
                    NAMES..NAMES + 32,
                    RELOCATIONS..RELOCATIONS + 96,
                ];
                let part = parts[random.usize(..parts.len())].clone();
                let word = &mut image.words[random.usize(part) / 8];
                *word = match random.u8(..4) {
                    0 => random.u64(..),
                    1 => *word ^ 1 << random.u8(..64),
                    2 => u64::MAX - random.u64(..64),
                    _ => random.u64(..2 * IMAGE_BYTES as u64),
                };
            }
            if random.bool() {
                let header = &mut image.headers[2];
                header.p_vaddr = random.u64(..IMAGE_BYTES as u64) & !7;
                header.p_memsz = random.u64(..2 * IMAGE_BYTES as u64);
            }
            match image.imports() {
                None => none += 1,
                Some(_) => some += 1,
            }
        }
        assert!(none > 1000 && some > 1000, "{none} unreadable, {some} readable");
    }
}
