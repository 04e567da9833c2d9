//! Shared libraries, as far as the dynamic linker looks at them first.

use std::fs::File;
use std::path::Path;

use object::Endianness;
use object::elf::{DT_NEEDED, DT_RPATH, DT_RUNPATH, FileHeader64};
use object::read::elf::{FileHeader, SectionTable};
use object::read::{ReadCache, StringTable};

type Header = FileHeader64<Endianness>;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Elf {
    /// The number of the processor's kind.
    pub(super) machine: u16,
    pub(super) needed: Vec<String>,
    /// The folders in which the needed libraries may lie, with `$ORIGIN` as it is written; from the
    /// RUNPATH, else the RPATH.
    pub(super) search: Vec<String>,
    pub(super) versions: Vec<String>,
}

impl Elf {
    /// Reads only the few parts of the file that are needed: the rest may be large.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let file = File::open(path).map_err(|error| format!("it cannot be opened: {error}"))?;
        let elf = Self::of(&ReadCache::new(file));
        elf.map_err(|error| format!("it is no shared library of a 64-bit host: {error}"))
    }

    fn of(data: &ReadCache<File>) -> object::read::Result<Self> {
        let header = Header::parse(data)?;
        let endian = header.endian()?;
        let sections = header.sections(endian, data)?;
        let table = sections.dynamic_table(endian, data)?;
        let (mut needed, mut rpath, mut runpath) = (Vec::new(), Vec::new(), Vec::new());
        for entry in table.iter() {
            let list = match entry.tag {
                DT_NEEDED => &mut needed,
                DT_RPATH => &mut rpath,
                DT_RUNPATH => &mut runpath,
                _ => continue,
            };
            list.push(text(table.string(entry)?));
        }
        let search = if runpath.is_empty() { rpath } else { runpath };
        let search = search.iter().flat_map(|paths| paths.split(':')).filter(|path| !path.is_empty());
        Ok(Self {
            machine: header.e_machine.get(endian).0,
            needed,
            search: search.map(str::to_owned).collect(),
            versions: versions(&sections, endian, data)?,
        })
    }
}

fn versions<'data>(
    sections: &SectionTable<'data, Header, &'data ReadCache<File>>,
    endian: Endianness,
    data: &'data ReadCache<File>,
) -> object::read::Result<Vec<String>> {
    let Some((definitions, strings)) = sections.gnu_verdef(endian, data)? else { return Ok(Vec::new()) };
    let strings: StringTable<'_, _> = sections.strings(endian, data, strings)?;
    let mut names = Vec::new();
    for definition in definitions {
        // The first name is the version's own; the other names are of versions that it follows.
        if let Some(name) = definition?.1.next()? {
            names.push(text(name.name(endian, strings)?));
        }
    }
    Ok(names)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
