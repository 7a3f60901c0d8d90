-- A row for each person: age, gender, the mean of the glucose values (LOINC 2345-7), and whether type 2 diabetes was recorded.
SELECT 2026 - p.year_of_birth AS age,
       p.gender_source_value AS gender,
       (SELECT AVG(m.value_as_number) FROM measurement m
         WHERE m.person_id = p.person_id AND m.measurement_concept_id = 3004501) AS glucose,
       CASE WHEN EXISTS (SELECT 1 FROM condition_occurrence c
         WHERE c.person_id = p.person_id AND c.condition_concept_id = 201826) THEN 'yes' ELSE 'no' END AS diabetes
  FROM person p
 ORDER BY p.person_id
