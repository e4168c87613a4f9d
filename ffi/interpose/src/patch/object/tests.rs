//! Images made by hand, right and wrong.

#![expect(unsafe_code, reason = "has images in buffers looked at as libraries")]
#![expect(clippy::cast_possible_truncation, reason = "an image of a test is small")]

use object::elf::{DT_HASH, PF_X, PT_NOTE};

use super::*;

const DYNAMIC: usize = 0x100;
const SYMBOLS: usize = 0x400;
const NAMES: usize = 0x600;
const RELOCATIONS: usize = 0x800;
pub(in super::super) const SLOTS: usize = 0x1000;
pub(in super::super) const IMAGE_BYTES: usize = 0x2000;
const TEXT: &[u8] = b"\0dlsym\0cuMemAlloc_v2\0weak\0own\0";

/// A library in a buffer: one segment, two relocations of calls and two of data.
#[derive(Debug)]
pub(in super::super) struct Image {
    words: Vec<u64>,
    pub(in super::super) headers: Vec<libc::Elf64_Phdr>,
}

pub(in super::super) fn header(
    kind: u32,
    flags: u32,
    start: usize,
    bytes: usize,
) -> libc::Elf64_Phdr {
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
    pub(in super::super) fn new() -> Self {
        let mut image = Self { words: vec![0; IMAGE_BYTES / 8], headers: Vec::new() };
        image.headers = vec![
            header(PT_NOTE.0, PF_R.0, 0, 8),
            header(PT_LOAD.0, (PF_R | PF_W | PF_X).0, 0, IMAGE_BYTES),
            header(PT_DYNAMIC.0, PF_R.0, DYNAMIC, 0x200),
        ];
        let relocation = size_of::<Rela>() as u64;
        let entries = [
            (DT_HASH, 0),
            (DT_JMPREL, RELOCATIONS as u64),
            (DT_PLTRELSZ, 2 * relocation),
            (DT_PLTREL, DT_RELA.0.cast_unsigned()),
            (DT_RELA, RELOCATIONS as u64 + 2 * relocation),
            (DT_RELASZ, 2 * relocation),
            (DT_STRTAB, NAMES as u64),
            (DT_STRSZ, TEXT.len() as u64),
            (DT_SYMTAB, SYMBOLS as u64),
            (DT_NULL, 0),
        ];
        for (number, (tag, value)) in entries.into_iter().enumerate() {
            image.put(DYNAMIC + 16 * number, &[tag.0.cast_unsigned(), value]);
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
            let info = symbol << 32 | u64::from(kind.0);
            image.put(RELOCATIONS + 24 * number, &[(SLOTS + 8 * number) as u64, info, 0]);
        }
        let mut names = TEXT.to_vec();
        names.resize(TEXT.len().next_multiple_of(8), 0);
        let words = names.chunks_exact(8).filter_map(|word| word.try_into().ok());
        let words: Vec<u64> = words.map(u64::from_le_bytes).collect();
        image.put(NAMES, &words);
        image
    }

    pub(in super::super) fn put(&mut self, at: usize, words: &[u64]) {
        self.words[at / 8..at / 8 + words.len()].copy_from_slice(words);
    }

    pub(in super::super) fn bias(&self) -> usize {
        self.words.as_ptr().expose_provenance()
    }

    pub(in super::super) fn info(&self) -> libc::dl_phdr_info {
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
    image.put(DYNAMIC, &[DT_NULL.0.cast_unsigned(), 0]);
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
