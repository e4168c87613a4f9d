//! The choice of the tenants that are paused for another, if several could be: the least that suffices.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use tenants::class::Class;
use tenants::identity::TenantName;

/// A tenant that could be paused.
#[derive(Clone, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) tenant: &'a TenantName,
    pub(super) class: Class,
    /// Does it launch nothing? Then its pause delays no work.
    pub(super) is_idle: bool,
    /// The time that it had beyond the tenant with the least time, in its quanta.
    pub(super) over_quanta: u64,
    /// The bytes that its pause would copy.
    pub(super) copied_bytes: u64,
    /// The bytes that its pause frees, by GPU.
    pub(super) gives: BTreeMap<&'a str, u64>,
}

/// The price of a choice; less is better. Tenants at work count first, and higher classes count more. Next are the classes of
/// idle tenants. Then come the time beyond a tenant's share, and the bytes to be copied.
type Price = ([usize; 2], bool, [usize; 2], Reverse<u64>, u64, usize);

fn price(chosen: &[&Candidate<'_>]) -> Price {
    let of = |class, is_idle| {
        let alike =
            |candidate: &&&Candidate<'_>| candidate.class == class && candidate.is_idle == is_idle;
        chosen.iter().filter(alike).count()
    };
    let is_any = |class, is_idle| usize::from(of(class, is_idle) > 0);
    let at_work = chosen.iter().any(|candidate| !candidate.is_idle);
    let most_over = chosen.iter().map(|candidate| candidate.over_quanta).max().unwrap_or(0);
    let copied_bytes = chosen.iter().map(|candidate| candidate.copied_bytes);
    (
        [of(Class::Guaranteed, false), is_any(Class::Fair, false)],
        at_work,
        [of(Class::Guaranteed, true), is_any(Class::Fair, true)],
        Reverse(most_over),
        copied_bytes.fold(0, u64::saturating_add),
        chosen.len(),
    )
}

fn suffices(chosen: &[&Candidate<'_>], short: &BTreeMap<&str, u64>) -> bool {
    short.iter().all(|(gpu, missing_bytes)| {
        let given = chosen.iter().filter_map(|candidate| candidate.gives.get(gpu).copied());
        given.fold(0, u64::saturating_add) >= *missing_bytes
    })
}

/// Returns the `candidates` to pause so that `short` is free on each GPU; none if all of them together do not suffice.
///
/// It tries each candidate alone. It also adds the cheapest ones until they suffice, and then removes those that are not needed.
pub(super) fn choose<'a>(
    candidates: &[Candidate<'a>],
    short: &BTreeMap<&str, u64>,
) -> Option<Vec<&'a TenantName>> {
    let mut cheapest_first: Vec<_> = candidates.iter().collect();
    cheapest_first.sort_by_key(|candidate| (price(&[candidate]), candidate.tenant));
    let mut several: Vec<&Candidate<'_>> = Vec::new();
    for candidate in &cheapest_first {
        if suffices(&several, short) {
            break;
        }
        several.push(candidate);
    }
    if !suffices(&several, short) {
        return None;
    }
    for index in (0..several.len()).rev() {
        let mut fewer = several.clone();
        fewer.remove(index);
        if suffices(&fewer, short) {
            several = fewer;
        }
    }
    let alone = cheapest_first.iter().map(|candidate| vec![*candidate]);
    let alone = alone.filter(|chosen| suffices(chosen, short));
    let best = alone.chain([several]).min_by_key(|chosen| price(chosen))?;
    Some(best.iter().map(|candidate| candidate.tenant).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(candidates: &[(&str, Class, u64, u64, u64)], missing_bytes: u64) -> Vec<String> {
        let names: Vec<_> =
            candidates.iter().map(|(name, ..)| TenantName::new(name).unwrap()).collect();
        let all: Vec<_> = candidates
            .iter()
            .zip(&names)
            .map(|((_, class, over_quanta, copied_bytes, gives), tenant)| Candidate {
                tenant,
                class: *class,
                is_idle: tenant.as_str().starts_with("idle"),
                over_quanta: *over_quanta,
                copied_bytes: *copied_bytes,
                gives: BTreeMap::from([("gpu", *gives)]),
            })
            .collect();
        let short = BTreeMap::from([("gpu", missing_bytes)]);
        let chosen = choose(&all, &short).unwrap_or_default();
        chosen.into_iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_least_that_suffices_makes_way() {
        use Class::{Background, Fair, Guaranteed};
        // A lower class first, though it copies more.
        assert_eq!(chosen(&[("a", Fair, 0, 1, 10), ("b", Background, 0, 9, 10)], 10), ["b"]);
        // One that copies nothing before one that copies all.
        assert_eq!(chosen(&[("a", Fair, 0, 10, 10), ("b", Fair, 0, 0, 10)], 10), ["b"]);
        // The tenant that has had most beyond its share.
        assert_eq!(chosen(&[("a", Fair, 5, 10, 10), ("b", Fair, 0, 0, 10)], 10), ["a"]);
        // One instead of two, and none that is not needed.
        let three = [("a", Fair, 0, 4, 4), ("b", Fair, 0, 5, 5), ("c", Fair, 0, 10, 10)];
        assert_eq!(chosen(&three, 10), ["c"]);
        assert_eq!(chosen(&three, 5), ["b"]);
        assert_eq!(chosen(&three, 9), ["a", "b"]);
        // One that is idle before all that work, whatever its class, and what its pause copies.
        let idle = [("a", Background, 9, 0, 10), ("idle", Guaranteed, 0, 10, 10)];
        assert_eq!(chosen(&idle, 10), ["idle"]);
        let idle = [("idle-1", Guaranteed, 0, 0, 10), ("idle-2", Fair, 0, 10, 10)];
        assert_eq!(chosen(&idle, 10), ["idle-2"]);
        // Both, where neither suffices; a higher class only where it must be.
        let two = [("a", Background, 0, 4, 4), ("b", Guaranteed, 0, 5, 6)];
        assert_eq!(chosen(&two, 10), ["a", "b"]);
        assert_eq!(chosen(&two, 4), ["a"]);
        assert!(chosen(&two, 11).is_empty());
    }
}
