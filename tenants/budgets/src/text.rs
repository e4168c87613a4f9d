//! The text format of budgets: the device memory that a tenant may hold on each GPU.
//!
//! `60GiB` is for every GPU, `0=60GiB` for the GPU with that number in `nvidia-smi`, `GPU-6ac1...=60GiB` for the one with that
//! identity. Several are joined by commas. A number means the same GPU in every process of a tenant and in every shell, even if
//! `CUDA_VISIBLE_DEVICES` changes the order there: budgets of several tenants are about one machine.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use vmm_pool::driver::DeviceUuid;

use sublet_protocol::size::Size;

/// The environment variable that has the budgets of a tenant's processes.
pub const BUDGET_VARIABLE: &str = "SUBLET_BUDGET";

/// Longest text of budgets, in bytes.
pub const TEXT_BYTES_MAX: usize = 4000;

const NONE: &str = "none";
/// The number of hexadecimal digits of an identity.
const UUID_DIGITS: usize = 32;

/// The GPU or GPUs that a budget is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Which {
    /// All GPUs that are not named.
    Every,
    /// The GPU with this number on this machine, in the order of PCI addresses.
    Index(u32),
    /// The GPU with this identity.
    Uuid(DeviceUuid),
}

/// The budgets of a tenant, in bytes. `None` for a GPU means no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budgets(BTreeMap<Which, Option<u64>>);

/// An error in the text of budgets.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// The text of a budget has no size. Nothing was changed. Units are `KiB`, `MiB`, `GiB` and `TiB`; `K`, `MB` and
    /// the like mean the same binary units.
    #[error(
        "'{text}' is no budget: say for example 60GiB for every GPU, 0=60GiB for the one that nvidia-smi shows as 0, or none"
    )]
    NoSize { text: String },
    /// The text of a budget names no GPU. Nothing was changed. `nvidia-smi -L` shows numbers and identities.
    #[error(
        "'{text}' names no GPU: say its number as nvidia-smi shows it, such as 0=60GiB, or its whole identity, \
         GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx=60GiB"
    )]
    NoGpu { text: String },
    /// The text names one GPU twice. Nothing was changed. Remove one of the two budgets.
    #[error("two budgets for {which}: say one")]
    Twice { which: Which },
    /// The budget names a number that no GPU of this machine has. Nothing was changed. `nvidia-smi -L` shows the
    /// numbers.
    #[error(
        "there is no GPU {index} for a budget: this machine has {count}, from 0 to {}, as nvidia-smi numbers them whatever \
         CUDA_VISIBLE_DEVICES says",
        count.saturating_sub(1)
    )]
    NoSuchGpu { index: u32, count: usize },
    /// The text of all budgets of a tenant is longer than the limit. Nothing was changed. Name fewer GPUs, or give
    /// one size for all GPUs.
    #[error(
        "these are {length} bytes of budgets, and {TEXT_BYTES_MAX} are the most: name fewer GPUs"
    )]
    TooLong { length: usize },
}

impl Budgets {
    /// Are there no budgets?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the budgets, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Which, Option<u64>)> {
        self.0.iter().map(|(which, budget)| (*which, *budget))
    }

    /// Returns the budget of a GPU: the one for its identity, else for its number, else for every GPU.
    pub fn of(&self, uuid: DeviceUuid, index: Option<u32>) -> Option<u64> {
        let by_index = || index.and_then(|index| self.0.get(&Which::Index(index)));
        let found = self.0.get(&Which::Uuid(uuid)).or_else(by_index);
        found.or_else(|| self.0.get(&Which::Every)).copied().flatten()
    }

    /// Checks the numbers against `count`, the number of this machine's GPUs, which is called only if a number is named. If it is
    /// zero, all numbers pass.
    ///
    /// # Errors
    /// [`BudgetError::NoSuchGpu`].
    pub fn check(&self, count: impl FnOnce() -> usize) -> Result<(), BudgetError> {
        let numbers = self.0.keys().filter_map(|which| match which {
            Which::Index(index) => Some(*index),
            Which::Every | Which::Uuid(_) => None,
        });
        let mut numbers = numbers.peekable();
        let count = numbers.peek().map_or(0, |_| count());
        let is_beyond =
            |index: &u32| count > 0 && usize::try_from(*index).is_ok_and(|index| index >= count);
        let beyond = numbers.find(is_beyond);
        beyond.map_or(Ok(()), |index| Err(BudgetError::NoSuchGpu { index, count }))
    }

    /// Returns these budgets with `changes`. A budget for a named GPU replaces its old one, and a budget for every GPU replaces
    /// all. `known` has the identities and numbers of GPUs, for a GPU that is named by both.
    #[must_use]
    pub fn changed_by(&self, changes: &Self, known: &[(DeviceUuid, Option<u32>)]) -> Self {
        if changes.0.contains_key(&Which::Every) {
            return changes.clone();
        }
        let mut all = self.0.clone();
        for (which, budget) in &changes.0 {
            for (uuid, index) in known {
                let by_index = index.map(Which::Index);
                if *which == Which::Uuid(*uuid) {
                    by_index.map(|other| all.remove(&other));
                } else if by_index == Some(*which) {
                    all.remove(&Which::Uuid(*uuid));
                }
            }
            all.insert(*which, *budget);
        }
        Self(all)
    }
}

impl FromStr for Budgets {
    type Err = BudgetError;

    fn from_str(text: &str) -> Result<Self, BudgetError> {
        let mut budgets = BTreeMap::new();
        for part in text.split(',').map(str::trim) {
            let (which, size) = match part.split_once('=') {
                None => (Which::Every, part),
                Some((gpu, size)) => (which(gpu.trim(), part)?, size.trim()),
            };
            let no_size = || BudgetError::NoSize { text: part.to_owned() };
            let budget = if size == NONE { None } else { Some(bytes(size).ok_or_else(no_size)?) };
            if budgets.insert(which, budget).is_some() {
                return Err(BudgetError::Twice { which });
            }
        }
        let budgets = Self(budgets);
        let length = budgets.to_string().len();
        if length > TEXT_BYTES_MAX {
            return Err(BudgetError::TooLong { length });
        }
        Ok(budgets)
    }
}

fn which(gpu: &str, part: &str) -> Result<Which, BudgetError> {
    let no_gpu = || BudgetError::NoGpu { text: part.to_owned() };
    if gpu.bytes().all(|byte| byte.is_ascii_digit()) && gpu.len() < UUID_DIGITS {
        return gpu.parse().map(Which::Index).map_err(|_| no_gpu());
    }
    uuid(gpu).map(Which::Uuid).ok_or_else(no_gpu)
}

/// Parses an identity, such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a` or `MIG-...`. None for any other text.
pub fn uuid(text: &str) -> Option<DeviceUuid> {
    let named = ["GPU-", "MIG-"].iter().find_map(|prefix| text.strip_prefix(prefix));
    let digits: String = named.unwrap_or(text).chars().filter(|digit| *digit != '-').collect();
    let is_whole = digits.len() == UUID_DIGITS && digits.bytes().all(|it| it.is_ascii_hexdigit());
    let number = is_whole.then(|| u128::from_str_radix(&digits, 16).ok()).flatten();
    number.map(|number| DeviceUuid(number.to_be_bytes()))
}

/// Parses the size of a budget. Zero is no budget, and neither is the largest number, which stands for no limit.
fn bytes(text: &str) -> Option<u64> {
    let Size(bytes) = text.parse().ok()?;
    (1..u64::MAX).contains(&bytes).then_some(bytes)
}

/// Writes a text that parses to the same budgets.
impl fmt::Display for Budgets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (which, budget)) in self.0.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            let named = match which {
                Which::Every => String::new(),
                Which::Index(index) => format!("{index}="),
                Which::Uuid(uuid) => format!("{uuid}="),
            };
            let budget = budget.map_or_else(|| NONE.to_owned(), |bytes| Size(bytes).exact());
            write!(f, "{comma}{named}{budget}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Every => f.write_str("every GPU"),
            Self::Index(index) => write!(f, "GPU {index}"),
            Self::Uuid(uuid) => uuid.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::gpus;

    const UUID: DeviceUuid = DeviceUuid([0x6a; 16]);

    fn read(text: &str) -> Budgets {
        text.parse().unwrap()
    }

    #[test]
    fn a_number_that_no_gpu_has_is_refused_where_the_machine_lists_them() {
        let list = tempfile::tempdir().unwrap();
        assert_eq!(read("7=1GiB").check(|| gpus::places(list.path()).len()), Ok(()));
        for name in ["0000:1b:00.0", "0000:9b:00.0"] {
            std::fs::create_dir(list.path().join(name)).unwrap();
        }
        for fits in ["1GiB", "0=1GiB,1=none", "GPU-6a6a6a6a-6a6a-6a6a-6a6a-6a6a6a6a6a6a=1GiB"] {
            assert_eq!(read(fits).check(|| gpus::places(list.path()).len()), Ok(()), "{fits}");
        }
        let refused = read("0=1GiB,2=1GiB").check(|| gpus::places(list.path()).len()).unwrap_err();
        assert_eq!(refused, BudgetError::NoSuchGpu { index: 2, count: 2 });
        assert!(refused.to_string().contains("from 0 to 1"), "{refused}");
    }

    #[test]
    fn identities_are_read_as_drivers_write_them() {
        let text = "GPU-6a6a6a6a-6a6a-6a6a-6a6a-6a6a6a6a6a6a";
        assert_eq!(uuid(text), Some(UUID));
        assert_eq!(uuid(&text.replace("GPU", "MIG")), Some(UUID));
        for text in
            ["", "GPU-", "GPU-6a6a", "MIG-GPU-6a6a6a6a-6a6a-6a6a-6a6a-6a6a6a6a6a6a/1/0", "0"]
        {
            assert_eq!(uuid(text), None, "{text}");
        }
    }

    #[test]
    fn a_gpu_is_named_by_number_by_identity_or_not_at_all() {
        assert_eq!(read("60GiB").of(UUID, Some(3)), Some(60 << 30));
        assert_eq!(read("60GiB").of(UUID, None), Some(60 << 30));
        let budgets = read("0=60GiB, 1=512MiB,2=none,4096");
        assert_eq!(budgets.of(UUID, Some(0)), Some(60 << 30));
        assert_eq!(budgets.of(UUID, Some(1)), Some(512 << 20));
        assert_eq!(budgets.of(UUID, Some(2)), None);
        assert_eq!(budgets.of(UUID, Some(7)), Some(4096));
        let named = "GPU-6a6a6a6a-6a6a-6a6a-6a6a-6a6a6a6a6a6a";
        let both = read(&format!("0=1GiB,{named}=2TiB"));
        assert_eq!(both.of(UUID, Some(0)), Some(2 << 40), "the identity says more");
        assert_eq!(read(&format!("{}=1KiB", "6a".repeat(16))).of(UUID, None), Some(1024));
        assert_eq!(read("0=1GiB").of(UUID, Some(1)), None);
        assert_eq!(Budgets::default().of(UUID, Some(0)), None);
    }

    #[test]
    fn what_is_no_budget_is_named() {
        for text in [
            "",
            "0=",
            "0",
            "0=0",
            "60PB",
            "1.5.5GiB",
            "-1",
            "0=60GiB,",
            "yes",
            "0=+5",
            "20000000000GiB",
        ] {
            let error = text.parse::<Budgets>().unwrap_err();
            assert!(matches!(error, BudgetError::NoSize { .. }), "{text:?}: {error}");
            assert!(error.to_string().contains("60GiB"), "{error}");
        }
        for text in
            ["=1GiB", "a=1GiB", "GPU-6a6a=1GiB", "-1=1GiB", "99999999999=1GiB", "cuda:0=1GiB"]
        {
            let error = text.parse::<Budgets>().unwrap_err();
            assert!(matches!(error, BudgetError::NoGpu { .. }), "{text:?}: {error}");
        }
        let twice = "0=1GiB,00=2GiB".parse::<Budgets>().unwrap_err();
        assert_eq!(twice.to_string(), "two budgets for GPU 0: say one");
        let long: Vec<_> = (0..500).map(|index| format!("{index}=1GiB")).collect();
        let error = long.join(",").parse::<Budgets>().unwrap_err();
        assert!(matches!(error, BudgetError::TooLong { .. }), "{error}");
    }

    #[test]
    fn a_change_replaces_what_it_names() {
        let known = [(UUID, Some(0))];
        let change =
            |before: &str, change: &str| read(before).changed_by(&read(change), &known).to_string();
        assert_eq!(change("0=60GiB,1=40GiB", "1=none"), "0=60GiB,1=none");
        assert_eq!(change("60GiB", "0=40GiB"), "60GiB,0=40GiB");
        assert_eq!(change("0=60GiB,1=40GiB", "50GiB"), "50GiB");
        assert_eq!(change("0=60GiB,1=40GiB", "none"), "none");
        let named = format!("{UUID}=2GiB");
        assert_eq!(change("0=60GiB", &named), named);
        assert_eq!(change(&named, "0=1GiB"), "0=1GiB");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            parts in prop::collection::btree_map(0_u32..100, prop::option::of(1_u64..u64::MAX), 1..9),
            every in prop::option::of(prop::option::of(1_u64..1 << 50)),
        ) {
            let mut all: BTreeMap<_, _> =
                parts.into_iter().map(|(index, budget)| (Which::Index(index), budget)).collect();
            all.extend(every.map(|budget| (Which::Every, budget)));
            let budgets = Budgets(all);
            prop_assert_eq!(budgets.to_string().parse::<Budgets>(), Ok(budgets));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            let _read = text.parse::<Budgets>();
        }
    }
}
