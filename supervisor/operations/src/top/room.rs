//! How many lines each part of the screen gets.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineNeeds {
    pub(super) models: usize,
    /// With all of each GPU, and with one line for each.
    pub(super) gpus: (usize, usize),
    pub(super) details: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineBudget {
    /// Besides the table's head.
    pub(super) models: usize,
    pub(super) gpus: usize,
    pub(super) full_gpus: bool,
    pub(super) details: usize,
}

/// What is shown of the table and of the details before GPUs get more than a line.
const FIRST_MODELS: usize = 5;
const FIRST_DETAILS: usize = 7;

/// `lines`: without the title, the table's head and the last line.
pub(super) fn share_out(lines: usize, wants: LineNeeds) -> LineBudget {
    let models = wants.models.min(FIRST_MODELS);
    let details = wants.details.min(FIRST_DETAILS);
    let full_gpus = models + details + wants.gpus.0 <= lines;
    let gpus = if full_gpus { wants.gpus.0 } else { wants.gpus.1 };
    // Without room for all, a model comes first, then its details, then GPUs.
    let models = models.min(lines);
    let gpus = gpus.min(lines.saturating_sub(models + details));
    let details = wants.details.min(lines - models - gpus);
    let spare = lines - models - gpus - details;
    let models = wants.models.min(models + spare);
    // More models before more details.
    let more = (wants.models - models).min(details.saturating_sub(FIRST_DETAILS));
    LineBudget { models: models + more, gpus, full_gpus, details: details - more }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_share_the_lines_and_leave_none_where_one_wants_more() {
        for lines in 0..60 {
            for (models, gpus, details) in
                [(0, 0, 0), (1, 1, 9), (3, 1, 12), (20, 1, 12), (20, 8, 9), (2, 4, 30)]
            {
                let wants = LineNeeds { models, gpus: (gpus * 3, gpus), details };
                let room = share_out(lines, wants);
                let used = room.models + room.gpus + room.details;
                assert!(used <= lines, "{lines} {wants:?} {room:?}");
                assert!(room.models <= models && room.details <= details, "{lines} {wants:?} {room:?}");
                let short = room.models < models || room.details < details;
                assert!(used == lines || !short, "{lines} {wants:?} {room:?}");
                assert!(room.models > 0 || lines == 0 || models == 0, "{lines} {wants:?} {room:?}");
            }
        }
    }

    #[test]
    fn on_a_usual_terminal_one_gpu_is_shown_in_full_and_many_by_a_line_each() {
        let room = |models, gpus| share_out(21, LineNeeds { models, gpus: (gpus * 3, gpus), details: 11 });
        assert_eq!(room(2, 1), LineBudget { models: 2, gpus: 3, full_gpus: true, details: 11 });
        assert_eq!(room(20, 1), LineBudget { models: 11, gpus: 3, full_gpus: true, details: 7 });
        assert_eq!(room(20, 8), LineBudget { models: 6, gpus: 8, full_gpus: false, details: 7 });
    }
}
