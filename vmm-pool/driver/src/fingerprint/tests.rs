use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const PIECE: usize = 4096;
/// Fixed keys, so that the results of these tests do not depend on chance.
const FIXED: Keys = Keys {
    a: 0x243f_6a88_85a3_08d3,
    b: 0x1319_8a2e_0370_7344,
    c: 0xa409_3822_299f_31d0,
    d: 0x082e_fa98_ec4e_6c89,
};

fn print_of(bytes: &[u8]) -> Fingerprint {
    FIXED.print(bytes)
}

fn lanes(bytes: &[u8]) -> (u64, u64) {
    let Fingerprint { first, second } = print_of(bytes);
    (first, second)
}

/// Returns bytes that differ from each other, by a seed.
fn filled(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        state = finish(state.wrapping_add(STEP_A), 0);
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[test]
fn zeros_of_any_size_have_one_fingerprint_and_nothing_else_has_it() {
    for length in [16, 4096, 65_536] {
        assert_eq!(print_of(&vec![0; length]), Fingerprint::ZERO);
    }
    // A product of a key with itself would hide these contents.
    let mut hidden = vec![0; 32];
    hidden[..8].copy_from_slice(&FIXED.a.to_le_bytes());
    assert!(!print_of(&hidden).is_zero());
    for at in 0..PIECE {
        for bit in 0..8 {
            let mut bytes = vec![0; PIECE];
            bytes[at] = 1 << bit;
            let print = print_of(&bytes);
            assert!(!print.is_zero() && print.is_known() && print.first != 0, "bit {bit} of {at}");
        }
    }
}

#[test]
fn the_function_is_what_it_was_when_the_kernel_was_made() {
    let print = |bytes: &[u8]| PieceSlot::answering(print_of(bytes)).0;
    assert_eq!(print(&filled(1, 64)), EXPECTED[0]);
    assert_eq!(print(&filled(2, PIECE)), EXPECTED[1]);
}

/// The values that another program has computed.
const EXPECTED: [[u64; 2]; 2] = [
    [7_354_714_697_334_372_118, 3_690_011_976_435_773_659],
    [17_830_473_635_975_199_248, 11_750_595_332_443_138_562],
];

/// The contents are two words. Each lane multiplies one half of them by zero, so that the other half does not count.
#[test]
fn contents_chosen_for_known_keys_are_told_apart_by_those_of_the_process() {
    let chosen = |low: u64, high: u64| [low.to_le_bytes(), high.to_le_bytes()].concat();
    let (one, other) = (chosen(FIXED.a, FIXED.c), chosen(FIXED.d, FIXED.b));
    assert_eq!(print_of(&one), print_of(&other), "they are not chosen for these keys");
    assert_ne!(Fingerprint::of(&one), Fingerprint::of(&other));
    assert_eq!(Fingerprint::of(&one), Fingerprint::of(&one.clone()), "the keys changed");
}

#[test]
fn a_bit_that_flips_changes_both_lanes_wherever_it_lies() {
    for base in [vec![0; PIECE], vec![0xff; PIECE], filled(7, PIECE)] {
        let before = lanes(&base);
        let mut seen = HashSet::new();
        let mut changed_bits = [0_u64; 2];
        for at in 0..PIECE {
            for bit in 0..8 {
                let mut bytes = base.clone();
                bytes[at] ^= 1 << bit;
                let after = lanes(&bytes);
                assert!(after.0 != before.0 && after.1 != before.1, "bit {bit} of byte {at}");
                assert!(seen.insert(after), "bit {bit} of byte {at}");
                changed_bits[0] += u64::from((after.0 ^ before.0).count_ones());
                changed_bits[1] += u64::from((after.1 ^ before.1).count_ones());
            }
        }
        let flips = (PIECE * 8) as u64;
        for changed in changed_bits {
            let tenths = changed * 10 / flips;
            assert!((310..=330).contains(&tenths), "{tenths} tenths of a bit change of 64");
        }
    }
}

#[test]
fn words_that_change_places_change_both_lanes() {
    let base = filled(3, PIECE);
    let before = lanes(&base);
    let words = PIECE / 8;
    for (one, other) in
        (0..words).flat_map(|one| [(one, (one + 1) % words), (one, (one + 7) % words)])
    {
        let mut bytes = base.clone();
        for byte in 0..8 {
            bytes.swap(one * 8 + byte, other * 8 + byte);
        }
        let after = lanes(&bytes);
        assert!(after.0 != before.0 && after.1 != before.1, "{one} and {other}");
    }
    let mut turned = base.clone();
    turned.rotate_left(16);
    assert_ne!(lanes(&turned).0, before.0);
}

#[test]
fn structured_contents_never_meet() {
    // Each lane alone is as good as 64 bits: among a million values no two are equal.
    let (mut firsts, mut seconds) = (HashSet::new(), HashSet::new());
    let mut all = 0_usize;
    let mut add = |bytes: &[u8]| {
        let (first, second) = lanes(bytes);
        firsts.insert(first);
        seconds.insert(second);
        all += 1;
    };
    let mut bytes = [0_u8; 256];
    // Counters, in each place, as integers and as halves of floating point numbers.
    for place in (0..256).step_by(8) {
        for value in 1..12_000_u64 {
            bytes[place..place + 8].copy_from_slice(&value.to_le_bytes());
            add(&bytes);
        }
        for value in 1..6_000_u64 {
            bytes[place..place + 8].copy_from_slice(&(value << 48).to_le_bytes());
            add(&bytes);
        }
        bytes.fill(0);
    }
    // One value everywhere, of each width.
    for value in 1..60_000_u64 {
        let everywhere = value.wrapping_mul(0x0001_0001_0001_0001).to_le_bytes();
        bytes.as_chunks_mut::<8>().0.fill(everywhere);
        add(&bytes);
    }
    // Two equal words in any two places.
    for one in 0..32 {
        for other in one + 1..32 {
            for value in 1..400_u64 {
                bytes.fill(0);
                bytes[one * 8..one * 8 + 8].copy_from_slice(&(value << 32).to_le_bytes());
                bytes[other * 8..other * 8 + 8].copy_from_slice(&(value << 32).to_le_bytes());
                add(&bytes);
            }
        }
    }
    assert!(all > 800_000, "{all}");
    assert_eq!((firsts.len(), seconds.len()), (all, all));
}

#[test]
fn a_piece_of_another_size_is_another_piece() {
    let bytes = filled(5, 256);
    let longer = [bytes.clone(), vec![0; 16]].concat();
    assert_ne!(print_of(&bytes), print_of(&longer));
}

proptest! {
    #[test]
    fn contents_that_differ_have_fingerprints_that_do(
        seed in any::<u64>(),
        changes in prop::collection::vec((0..PIECE, 1_u8..), 1..5),
    ) {
        let before = filled(seed, PIECE);
        let mut after = before.clone();
        for (at, by) in changes {
            after[at] ^= by;
        }
        prop_assert_eq!(before == after, print_of(&before) == print_of(&after));
    }
}
