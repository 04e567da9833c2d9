//! Formats tables and sentences for a given width.

/// The width of text output, in columns. Most terminals have at least this width.
pub(crate) const WIDTH: usize = 80;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A column of a table with rows of type `R`: its head, and the function that returns the cell of a
/// row. If the table is too wide, columns are omitted, starting with the highest rank. Columns of
/// rank 0 are never omitted.
#[derive(Debug)]
pub(crate) struct TableColumn<R> {
    pub(crate) rank: u8,
    pub(crate) head: &'static str,
    pub(crate) align: Align,
    pub(crate) cell: fn(&R) -> String,
}

/// The treatment of a row whose first cell is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LongCell {
    Cut,
    /// The cell gets a separate line above the rest of its row.
    OwnLine,
}

/// The width to which the first column shrinks before other columns are omitted.
const NARROW: usize = 10;
/// The width to which the first column shrinks when no other column can be omitted.
const LEAST: usize = 4;

pub(crate) const fn left<R>(rank: u8, head: &'static str, cell: fn(&R) -> String) -> TableColumn<R> {
    TableColumn { rank, head, align: Align::Left, cell }
}

pub(crate) const fn right<R>(rank: u8, head: &'static str, cell: fn(&R) -> String) -> TableColumn<R> {
    TableColumn { rank, head, align: Align::Right, cell }
}

/// Returns the head and all rows as lines of at most `width` columns. If the columns of rank 0 need
/// more than `width` columns of text, the lines are longer.
pub(crate) fn aligned<R>(
    columns: &[TableColumn<R>],
    rows: &[R],
    width: usize,
    long: LongCell,
) -> Vec<String> {
    let cells: Vec<Vec<String>> = columns.iter().map(|column| cells(column, rows)).collect();
    let mut widths: Vec<usize> = cells.iter().map(|cells| widest(cells)).collect();
    let mut kept: Vec<usize> = (0..columns.len()).collect();
    let others =
        |kept: &[usize], widths: &[usize]| kept.iter().skip(1).map(|&i| widths[i] + 1).sum::<usize>();
    let first = widths.first().copied().unwrap_or(0);
    while others(&kept, &widths) + first.min(NARROW) > width {
        let last = kept.iter().copied().filter(|&i| columns[i].rank > 0).max_by_key(|&i| columns[i].rank);
        let Some(last) = last else { break };
        kept.retain(|&i| i != last);
    }
    let room = width.saturating_sub(others(&kept, &widths)).max(LEAST);
    if let Some(first) = widths.first_mut() {
        *first = room.min(*first);
    }
    (0..=rows.len()).map(|row| line(columns, &cells, &widths, &kept, row, long)).collect()
}

fn cells<R>(column: &TableColumn<R>, rows: &[R]) -> Vec<String> {
    std::iter::once(column.head.to_owned()).chain(rows.iter().map(column.cell)).collect()
}

fn widest(cells: &[String]) -> usize {
    cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0)
}

fn line<R>(
    columns: &[TableColumn<R>],
    cells: &[Vec<String>],
    widths: &[usize],
    kept: &[usize],
    row: usize,
    long: LongCell,
) -> String {
    let mut line = String::new();
    for &i in kept {
        let (cell, width) = (&cells[i][row], widths[i]);
        if i > 0 {
            line.push(' ');
        }
        match columns[i].align {
            _ if cell.chars().count() > width && long == LongCell::OwnLine => {
                line.push_str(&format!("{cell}\n{:width$}", ""));
            }
            _ if cell.chars().count() > width => line.push_str(&cut(cell, width)),
            Align::Left => line.push_str(&format!("{cell:<width$}")),
            Align::Right => line.push_str(&format!("{cell:>width$}")),
        }
    }
    line.trim_end().to_owned()
}

/// Cuts a text to `width` characters. An ellipsis shows that the text was cut.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    if width == 0 { kept } else { kept + "…" }
}

/// Wraps a text into lines of at most `width` characters, and indents all lines but the first.
/// Breaks words that are longer than a line. Replaces control characters, because parts of the text
/// may come from clients or models.
pub(crate) fn wrapped(text: &str, width: usize, indent: usize) -> Vec<String> {
    let plain = |letter: char| if letter.is_control() && !letter.is_whitespace() { '?' } else { letter };
    let text: String = text.chars().map(plain).collect();
    let mut lines = vec![String::new()];
    let mut filled = 0;
    let indent = indent.min(width.saturating_sub(1));
    for word in text.split_whitespace() {
        let length = word.chars().count();
        let gap = usize::from(filled > 0 && lines.last().is_some_and(|line| !line.ends_with(' ')));
        let last = lines.len() - 1;
        if filled + gap + length <= width {
            lines[last].push_str(&" ".repeat(gap));
            lines[last].push_str(word);
            filled += gap + length;
            continue;
        }
        for letter in word.chars().enumerate() {
            let fresh = letter.0 == 0 && filled > 0;
            if fresh || filled >= width.max(1) {
                lines.push(" ".repeat(indent));
                filled = indent;
            }
            if let Some(line) = lines.last_mut() {
                line.push(letter.1);
            }
            filled += 1;
        }
    }
    lines
}

/// Wraps a text like [`wrapped`], and indents all lines by two.
pub(crate) fn block(text: &str, width: usize) -> Vec<String> {
    wrapped(text, width.saturating_sub(2), 0).iter().map(|line| format!("  {line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [TableColumn<(&str, u32)>; 3] = [
        left(0, "NAME", |row| row.0.to_owned()),
        right(0, "N", |row| row.1.to_string()),
        left(1, "MORE", |row| "x".repeat(row.1 as usize)),
    ];

    #[test]
    fn columns_are_as_wide_as_needed_and_are_left_out_by_rank() {
        let rows = [("one", 7), ("a-long-name", 12)];
        let all = aligned(&COLUMNS, &rows, 40, LongCell::Cut);
        assert_eq!(all, ["NAME         N MORE", "one          7 xxxxxxx", "a-long-name 12 xxxxxxxxxxxx"]);
        assert_eq!(aligned(&COLUMNS, &rows, 10, LongCell::Cut), ["NAME     N", "one      7", "a-long… 12"]);
        let own = aligned(&COLUMNS, &rows, 10, LongCell::OwnLine);
        assert_eq!(own[2], "a-long-name\n        12");
        assert_eq!(aligned(&COLUMNS, &[], 3, LongCell::Cut), ["NAME N"]);
    }

    #[test]
    fn sentences_are_broken_between_words_and_words_where_they_must_be() {
        assert_eq!(wrapped("it makes room for one", 10, 2), ["it makes", "  room for", "  one"]);
        assert_eq!(wrapped("a 0123456789 b", 6, 1), ["a", " 01234", " 56789", " b"]);
        assert_eq!(wrapped("", 6, 1), [""]);
        assert_eq!(wrapped("a\u{1b}[2J\nb", 9, 1), ["a?[2J b"]);
        for width in 0..5 {
            for line in wrapped("some words", width, 2) {
                assert!(line.chars().count() <= width.max(1), "{width}: {line:?}");
            }
        }
        assert_eq!(
            (cut("abc", 3), cut("abcd", 3), cut("abc", 0)),
            ("abc".into(), "ab…".into(), String::new())
        );
    }
}
