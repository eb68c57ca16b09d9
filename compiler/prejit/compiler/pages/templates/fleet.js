const rows = [...document.querySelectorAll('#machines tbody tr')];
const text = rows.map(row => row.textContent.toLowerCase());
const search = document.getElementById('search'), only = document.getElementById('only');
function show() {
  const words = search.value.toLowerCase().split(/\s+/);
  let shown = 0;
  rows.forEach((row, i) => {
    const fits = words.every(word => text[i].includes(word)) &&
      (!only.checked || row.dataset.out !== undefined);
    row.hidden = !fits;
    shown += fits;
  });
  document.getElementById('shown').textContent = `${shown} of ${rows.length}`;
}
search.addEventListener('input', show);
only.addEventListener('change', show);
show();
