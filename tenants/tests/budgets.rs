//! What processes of a tenant count together, when the file that they count in is removed. Members over simulated drivers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use sublet_stage::memory::UNIT;
use sublet_stage::{Place, Process};
use tenants::budget::{self, BudgetReport, Counts};
use tenants::coordinator::{Coordinator, Options};
use vmm_pool::Class;
use vmm_pool::driver::sim::SimOptions;
use vmm_pool::driver::{AllocationProp, DeviceOrdinal};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

fn process(place: &Place, budget_units: Option<u64>) -> Process {
    let budgets = budget_units.map(|units| format!("0={}", units * UNIT).parse().unwrap());
    let counts = Counts::of(budgets, |device, _| device.0.try_into().ok(), |_| 0);
    let join = place.join_with("train", SimOptions::default(), |it| it.counting = Some(counts));
    join.unwrap()
}

fn takes(process: &Process, units: u64) -> bool {
    let prop = AllocationProp::pinned_on(DEVICE);
    process.pool().enter().create(units * UNIT, &prop, Class::default()).is_ok()
}

fn coordinator(place: &Place, process: &Process) -> Coordinator {
    Coordinator::new(
        place.run_dir().clone(),
        process.presence().tenant().clone(),
        Options::default(),
    )
}

fn change(place: &Place, process: &Process, units: u64) -> BudgetReport {
    let budgets = format!("0={}", units * UNIT).parse().unwrap();
    budget::change(&coordinator(place, process), &budgets).unwrap()
}

fn file(place: &Place) -> PathBuf {
    place.run_dir().path().join("train/budget")
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_mins(1);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_change_of_budgets_whose_file_has_gone_has_an_effect_on_those_that_run() {
    let place = Place::new(&[32 * UNIT]).unwrap();
    let first = process(&place, Some(8));
    let second = process(&place, Some(8));
    assert!(takes(&first, 3) && takes(&second, 2) && !takes(&first, 4));
    std::fs::remove_file(file(&place)).unwrap();
    let report = change(&place, &first, 6);
    assert!(report.failures.is_empty(), "{report:?}");
    assert_eq!(report.gpus[0].held_bytes, 5 * UNIT, "what was held before is counted");
    assert!(!takes(&first, 2), "beyond the new budget");
    assert!(takes(&second, 1));
    assert!(!takes(&first, 1));
}

#[test]
fn a_file_of_budgets_that_was_removed_is_made_again_and_who_joined_meanwhile_counts() {
    let place = Place::new(&[32 * UNIT]).unwrap();
    let first = process(&place, Some(8));
    assert!(takes(&first, 5));
    std::fs::remove_dir_all(place.run_dir().path()).unwrap();
    until("the run directory is there again", || place.run_dir().path().is_dir());
    let later = process(&place, None);
    until("the file is made again", || file(&place).exists());
    until("who joined meanwhile counts", || later.pool().budget().counts());
    let report = || budget::budgets(&coordinator(&place, &first)).unwrap().unwrap();
    let gpu = || report().gpus[0].clone();
    until("what the first holds counts there", || gpu().held_bytes == 5 * UNIT);
    assert_eq!(gpu().budget_bytes, Some(8 * UNIT));
    assert!(!takes(&later, 4) && takes(&later, 3) && !takes(&first, 1));
    let notes = first.stats().notes;
    assert!(notes.iter().any(|note| note.contains("budgets had been removed")), "{notes:?}");
}
