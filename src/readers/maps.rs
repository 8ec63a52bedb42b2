//! The kernel's texts about a process's address space: `maps`, and `smaps` with its numbers.

use super::Segments;

/// What a process does with the segments that it has mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes of the maps that are in its page tables.
    pub resident_bytes: u64,
    /// Bytes of private maps that it has written to, and so has copies of.
    pub private_bytes: u64,
    /// Memory of its own altogether, those copies and its heap: what a loader that copies a model grows by.
    /// `None` where the kernel does not tell it.
    pub own_bytes: Option<u64>,
}

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    bytes: u64,
    /// As `st_dev`.
    device: u64,
    inode: u64,
}

/// Bytes of address space on `segments`, from the text of `maps`.
pub(super) fn mapped_bytes(maps: &[u8], segments: &Segments) -> u64 {
    let areas = maps
        .split(|byte| *byte == b'\n')
        .filter_map(|line| area(line).filter(|area| segments.maps(area.device, area.inode, line)));
    areas.fold(0, |sum, area| {
        // Sums of address space fit, but the text is the kernel's and not ours.
        sum.saturating_add(area.bytes)
    })
}

/// What is done with them, from the text of `smaps`, and `status` for the rest.
pub(super) fn memory(smaps: &[u8], status: &[u8], segments: &Segments) -> Memory {
    let mut memory = Memory { own_bytes: kibibytes_of(status, b"RssAnon:"), ..Memory::default() };
    let mut is_ours = false;
    for line in smaps.split(|byte| *byte == b'\n') {
        if let Some(area) = area(line) {
            is_ours = segments.maps(area.device, area.inode, line);
        } else if is_ours {
            let add = |sum: &mut u64, field| *sum = sum.saturating_add(kibibytes(line, field).unwrap_or(0));
            add(&mut memory.resident_bytes, b"Rss:");
            // Of a file's map, only what was copied on a write is anonymous.
            add(&mut memory.private_bytes, b"Anonymous:");
        }
    }
    memory
}

/// `start-end permissions offset major:minor inode path`: the numbers but the inode hexadecimal, the path
/// anything, line breaks in it escaped. `None` for any other line.
fn area(line: &[u8]) -> Option<Area> {
    let mut words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
    let (start, end) = pair(words.next()?, b'-')?;
    let (_permissions, _offset) = (words.next()?, words.next()?);
    let (major, minor) = pair(words.next()?, b':')?;
    let inode = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let device = rustix::fs::makedev(u32::try_from(major).ok()?, u32::try_from(minor).ok()?);
    Some(Area { bytes: end.checked_sub(start)?, device, inode })
}

fn pair(word: &[u8], between: u8) -> Option<(u64, u64)> {
    let at = word.iter().position(|byte| *byte == between)?;
    Some((hexadecimal(&word[..at])?, hexadecimal(&word[at + 1..])?))
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
    u64::from_str_radix(digits, 16).ok()
}

fn kibibytes_of(text: &[u8], field: &[u8]) -> Option<u64> {
    text.split(|byte| *byte == b'\n').find_map(|line| kibibytes(line, field))
}

/// The bytes that a line `FIELD  12 kB` speaks of.
fn kibibytes(line: &[u8], field: &[u8]) -> Option<u64> {
    let rest = std::str::from_utf8(line.strip_prefix(field)?).ok()?;
    rest.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAPS: &[u8] = b"\
55d0c8a00000-55d0c8a02000 r--p 00000000 fe:01 131090                     /usr/bin/cat
7f0000000000-7f0000200000 r--s 00000000 00:01 2053                       /memfd:iloader:q:a b.bin (deleted)
7f0000200000-7f0000201000 rw-p 00200000 00:01 2053                       /memfd:iloader:q:a b.bin (deleted)
7f0000300000-7f0000301000 r--s 00000000 00:12a 7                         /iloader:q:config.json (deleted)
7f0000400000-7f0000401000 r--p 00000000 fe:01 2053                       /odd\\012name 7f0-8f0 r--p 0 00:01 2053
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    fn segments(pairs: &[(u32, u32, u64)]) -> Segments {
        pairs.iter().map(|(major, minor, inode)| (rustix::fs::makedev(*major, *minor), *inode)).collect()
    }

    #[test]
    fn maps_are_told_by_device_and_inode() {
        let mapped = |pairs: &[(u32, u32, u64)]| mapped_bytes(MAPS, &segments(pairs));
        assert_eq!(mapped(&[(0, 1, 2053)]), 0x20_1000, "both maps of one segment");
        assert_eq!(mapped(&[(0, 0x12a, 7)]), 0x1000, "a minor number of more than a byte");
        assert_eq!(mapped(&[(0, 1, 2053), (0, 0x12a, 7)]), 0x20_2000);
        assert_eq!(mapped(&[(0xfe, 1, 2053)]), 0x1000, "another device with the same inode");
        assert_eq!(mapped(&[(0, 2, 2053), (0, 1, 2054)]), 0);
        assert_eq!(mapped_bytes(b"", &segments(&[(0, 1, 2053)])), 0);
    }

    #[test]
    fn lines_that_are_no_maps_are_passed_over() {
        for line in [
            &b""[..],
            b"Rss:                 100 kB",
            b"VmFlags: rd mr mw me sd",
            b"7f00-7e00 r--p 0 00:01 5",
            b"7f00 r--p 0 00:01 5",
            b"7f00-8f00 r--p 0 0001 5",
            b"7f00-8f00 r--p 0 00:01 five",
            b"7f00-8f00 r--p 0 00:01",
            b"+7f00-8f00 r--p 0 00:01 5",
            b"7f00-\xff r--p 0 00:01 5",
        ] {
            assert_eq!(area(line), None, "{}", String::from_utf8_lossy(line));
        }
        let odd = area(b"7f00-8f00 r--p 0 00:01 5 \xff\xfe (deleted)").expect("any path will do");
        assert_eq!((odd.bytes, odd.inode), (0x1000, 5));
    }

    #[test]
    fn numbers_belong_to_the_map_above_them() {
        let smaps = b"\
7f0000000000-7f0000200000 r--s 00000000 00:01 2053                       /memfd:iloader:q:a (deleted)
Size:               2048 kB
Rss:                 100 kB
Private_Dirty:         7 kB
Anonymous:             0 kB
7f0000200000-7f0000201000 rw-p 00200000 00:01 2053                       /memfd:iloader:q:a (deleted)
Rss:                   8 kB
Pss:                   8 kB
Anonymous:             4 kB
VmFlags: rd wr mr mw me ac sd
7f0000300000-7f0000301000 rw-p 00000000 00:00 0                          [heap]
Rss:                5000 kB
Anonymous:          5000 kB
";
        let status = b"Name:\tRssAnon: 1 kB\nVmRSS:\t   9000 kB\nRssAnon:\t   5004 kB\n";
        let memory = memory(smaps, status, &segments(&[(0, 1, 2053)]));
        assert_eq!((memory.resident_bytes, memory.private_bytes), (108 << 10, 4 << 10));
        assert_eq!(memory.own_bytes, Some(5004 << 10));
        assert_eq!(super::memory(b"", b"", &segments(&[])), Memory::default());
    }

    proptest! {
        #[test]
        fn any_text_is_read(bytes in proptest::collection::vec(any::<u8>(), 0..400), text in "([0-9a-f:. -]{0,30}|Rss: [0-9]{0,30} kB|\n){0,40}") {
            let ours = segments(&[(0, 1, 5)]);
            for text in [bytes.as_slice(), text.as_bytes()] {
                let _ = (mapped_bytes(text, &ours), memory(text, text, &ours));
            }
        }
    }
}
