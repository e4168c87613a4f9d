//! Whether the machine is short of host memory.

use crate::figures::HostFigure;

/// The decision whether idle host memory is to be freed. It begins when less than a twentieth of any memory is available, and
/// ends when a tenth of each is. So a figure that varies a little changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pressure {
    is_short: bool,
}

impl Pressure {
    /// Looks at the present figures. Returns the one that is short, while idle memory is to be freed.
    pub(super) fn look<'a>(&mut self, figures: &'a [HostFigure]) -> Option<&'a HostFigure> {
        let was_short = self.is_short;
        let enough =
            |it: &HostFigure| if was_short { it.reserve_bytes() } else { it.total_bytes / 20 };
        let short = figures.iter().find(|figure| figure.available_bytes < enough(figure));
        self.is_short = short.is_some();
        short
    }
}

#[cfg(test)]
mod tests {
    use sublet_protocol::host_memory::{GroupIdentity, LimitKind};

    use super::*;

    fn machine(available_bytes: u64) -> HostFigure {
        HostFigure { kind: LimitKind::Available, total_bytes: 1000, available_bytes }
    }

    #[test]
    fn pressure_begins_low_and_ends_high_and_one_short_group_is_enough() {
        let mut pressure = Pressure::default();
        let is_short = [60, 50, 49, 60, 99, 100, 60, 40]
            .map(|available_bytes| pressure.look(&[machine(available_bytes)]).is_some());
        assert_eq!(is_short, [false, false, true, true, true, false, false, true]);
        assert_eq!(pressure.look(&[]), None);
        let group = HostFigure {
            kind: LimitKind::ControlGroup {
                path: "/sys/fs/cgroup".into(),
                identity: GroupIdentity(1, 0),
            },
            total_bytes: 100,
            available_bytes: 4,
        };
        let figures = [machine(900), group];
        assert_eq!(pressure.look(&figures), Some(&figures[1]));
    }
}
